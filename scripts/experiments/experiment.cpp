// experiment: trains arms, which are wirings with options of their own, over seeds and learning rates, as a TOML file
// or the command line says, and has `report` compare them. What is done is seen in the runs' folders alone, so that the
// same command continues where it was stopped. scripts/experiments/README.md describes the file.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <toml++/toml.h>
#include <cmath>
#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <thread>
#include "llmc/formats/checkpoint.h"
#include "llmc/train/print.h"
#include "llmc/train/run_history.h"
#include "llmc/train/run_lock.h"
#include "llmc/train/stop_signal.h"
#include "llmc/base/clock.h"
#include "llmc/base/command_line.h"
#include "llmc/base/json.h"
#include "llmc/base/message.h"
#include "llmc/base/program.h"

using json = nlohmann::ordered_json;
using Words = std::vector<std::string>;

struct Arm {
  std::string wiring, folder, name;  // runs lie in OUT/FOLDER/NAME-SEED, with rates in OUT/FOLDER/RATE/NAME-SEED
  std::string published;             // what difference a publication found
  Words options;
  int64_t steps = 0;  // updates of each run, once plan_arms has asked
};

struct Group {
  std::string name, title, text, probe, equal_flops;
  Words options, rates;
  std::vector<Arm> arms;
  int64_t search_seed = 1, steps = 0, first_seed = 1, last_seed = 1;
};

struct Experiment {
  std::string file, wirings, seeds, data, about, out, only, trainer;
  int64_t steps = 0, jobs = 0;
  bool dry_run = false;
  Words more;  // options of the trainer, after all others
  std::vector<Group> groups;
  std::map<std::string, int> failed;  // folders of runs, with the status that they ended with
};

static void append(Words& words, const Words& more) { words.insert(words.end(), more.begin(), more.end()); }

static Words words_of(std::string text, char separator = ' ') {
  std::replace(text.begin(), text.end(), '\n', ' ');
  Words words = split(text, separator);
  words.erase(std::remove_if(words.begin(), words.end(), is_blank), words.end());
  return words;
}

// ----------------------------------------------------------------------------
// What is to be compared

// A text as a part of a folder's name: "gqa(2) window(4)" is gqa_2_window_4.
static std::string name_of(const std::string& text) {
  const std::string name = std::regex_replace(text, std::regex("[^a-zA-Z0-9.]+"), "_");
  return name.substr(0, name.find_last_not_of('_') + 1);
}

// A text as paragraphs of an outline (llmc/report/report.h).
static std::string paragraphs_of(const std::string& text) {
  std::string paragraphs;
  for (const std::string& line : lines_of(text)) paragraphs += (paragraphs.empty() ? " " : "\n ") + line;
  return paragraphs;
}

// Throws UserError for an option that is each run's own.
static void check_options(const Words& options, bool has_rates, bool has_steps) {
  std::string own = "(--wiring|--seed|--out|--resume|--same-options|--dry-run|--help)(=.*)?|-[hoy].*";
  if (has_rates) own += "|--learning-rate(=.*)?|-l.*";
  if (has_steps) own += "|--steps(=.*)?|-x.*";
  for (const std::string& option : options)
    if (std::regex_match(option, std::regex(own)))
      user_error("%s: each run has its own; leave it out of the options", option);
}

// What the value of a key must be instead, "" where it is right.
static std::string expected_instead(const std::string& key, const json& value) {
  if (key == "steps" || key == "search_seed")
    return value.is_number_integer() && value >= 1 && value <= 1000000000 ? ""
                                                                          : "a whole number from 1 to 1,000,000,000";
  if (key != "arms" && key != "group" && key != "probes" && key != "rates") return value.is_string() ? "" : "a text";
  const auto fits = [&](const json& v) {
    return (v.is_object() && (key == "arms" || key == "group")) || (v.is_string() && key != "group");
  };
  if (value.is_array() && std::all_of(value.begin(), value.end(), fits)) return "";
  return key == "arms" ? "a list of texts and tables" : key == "group" ? "a list of tables" : "a list of texts";
}

static void check_keys(const json& table, const std::string& file, const std::string& keys) {
  for (const auto& [key, value] : table.items()) {
    if ((" " + keys + " ").find(" " + key + " ") == std::string::npos)
      user_error("%s: %s: is no key here; the keys are %s", file, key, keys);
    if (const std::string expected = expected_instead(key, value); !expected.empty())
      user_error("%s: %s: must be %s", file, key, expected);
  }
}

static Group group_of(const json& j, const Experiment& e) {
  Group g;
  g.name = j.value("name", ""), g.title = j.value("title", g.name), g.text = paragraphs_of(j.value("text", ""));
  g.probe = j.value("probe", ""), g.equal_flops = j.value("equal_flops", "");
  g.options = words_of(j.value("options", "")), g.rates = j.value("rates", Words());
  g.search_seed = j.value("search_seed", 1), g.steps = e.steps > 0 ? e.steps : j.value("steps", int64_t(0));
  for (const json& arm : e.wirings.empty() ? j.value("arms", json::array()) : json(words_of(e.wirings, ';'))) {
    const json a = arm.is_object() ? arm : json{{"wiring", arm}};
    check_keys(a, e.file, "wiring from published options");
    const std::string wiring = joined(words_of(a.at("wiring").get<std::string>()), " ");
    g.arms.push_back(
        {wiring, a.value("from", g.name), name_of(wiring), a.value("published", ""), words_of(a.value("options", ""))});
  }
  const bool has_steps = g.steps > 0 || !g.equal_flops.empty();
  for (const Arm& a : g.arms) check_options(a.options, !g.rates.empty(), has_steps);
  for (const Words& options : {g.options, e.more}) check_options(options, !g.rates.empty(), has_steps);
  std::smatch seeds;
  const std::string text = e.seeds.empty() ? j.value("seeds", "") : e.seeds;
  if (text.empty()) user_error("no seeds: give --seeds 3, or a FILE with seeds");
  if (!std::regex_match(text, seeds, std::regex("(?:([1-9][0-9]{0,5}):)?([1-9][0-9]{0,5})")))
    user_error("seeds '%s': must be a number, at least 1, or FIRST:LAST", text);
  g.first_seed = seeds[1].matched ? std::stol(seeds[1]) : 1, g.last_seed = std::stol(seeds[2]);
  if (g.first_seed > g.last_seed) user_error("seeds '%s': the first is after the last", text);
  for (const std::string& rate : g.rates)
    if (parse_number<double>(rate) <= 0) user_error("%s: rates: '%s': must be above 0", e.file, rate);
  if (g.arms.empty()) user_error("no wirings: give --wirings 'plain; sla(9,9)', or a FILE with arms");
  return g;
}

// Reads the file, if there is one. Returns the command that makes its data, "" for none.
static std::string read_experiment(Experiment& e) {
  json all = json::object();
  try {
    if (!e.file.empty()) {
      std::ostringstream text;
      text << toml::json_formatter(toml::parse(read_whole_file(e.file)));
      all = json::parse(text.str());
    }
    const std::string of_groups = "arms equal_flops options rates search_seed seeds steps";
    check_keys(all, e.file, "about data group make_data probes " + of_groups);
    e.about = paragraphs_of(all.value("about", ""));
    if (e.data.empty()) e.data = all.value("data", "");
    json groups = all.value("group", json::array());
    for (const json& group : groups) check_keys(group, e.file, "name text title " + of_groups);
    for (const std::string& probe : all.value("probes", Words()))
      groups.push_back({{"name", name_of(probe)}, {"title", probe}, {"probe", probe}});
    if (e.file.empty()) groups.push_back(json::object());
    const Words only = words_of(e.only, ',');
    std::set<std::string> names;
    for (const json& group : groups) names.insert(group.value("name", ""));
    for (const std::string& name : only)
      if (names.count(name) == 0) user_error("--only %s: %s has no such group", name, e.file);
    for (const json& group : groups) {
      if (!only.empty() && std::count(only.begin(), only.end(), group.value("name", "")) == 0) continue;
      json merged = all;
      merged.update(group);
      merged["options"] = all.value("options", "") + " " + group.value("options", "");
      e.groups.push_back(group_of(merged, e));
    }
  } catch (const toml::parse_error& error) {
    user_error("%s:%d: is not TOML: %s", e.file, int(error.source().begin.line), std::string(error.description()));
  } catch (const json::exception& error) { user_error("%s: %s", e.file, words_of(error)); }
  if (e.groups.empty()) user_error("%s: has no group or probe", e.file);
  return all.value("make_data", "");
}

// ----------------------------------------------------------------------------
// Programs

// Starts a program that prints to `out`, on stderr too with `all`. If this process dies, the program gets SIGUSR1, on
// which the trainer stops after a checkpoint. With `alone` it has a process group of its own, so that Ctrl-C does not
// reach it.
static pid_t start(const Words& command, int out, bool all, bool alone = false,
                   const std::map<std::string, std::string>& variables = {}) {
  const pid_t pid = fork();
  if (pid < 0) user_error("%s: cannot be started: %s", command[0], strerror(errno));
  if (pid > 0) return pid;
  sigset_t none;
  sigemptyset(&none), sigprocmask(SIG_SETMASK, &none, nullptr);
  prctl(PR_SET_PDEATHSIG, SIGUSR1);
  if (alone) setpgid(0, 0);
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  dup2(out, STDOUT_FILENO);
  if (all) dup2(out, STDERR_FILENO);
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  execvp(argv[0], argv.data());
  fprintf(stderr, "error: %s: cannot be started: %s\n", argv[0], strerror(errno));
  _exit(127);
}

static int exit_status(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status); }

struct Printed {
  int status;
  std::string text;
};

static Printed run(const Words& command, bool all = false) {
  const FileDescriptor file(memfd_create("printed", MFD_CLOEXEC));
  int status = 0;
  waitpid(start(command, file.fd, all), &status, 0);
  return {exit_status(status), read_whole_file(format("/proc/self/fd/%d", file.fd))};
}

// The last line, without "error: ".
static std::string last_line(const std::string& text) {
  const std::string lines = text.substr(0, text.find_last_not_of('\n') + 1), line = lines.substr(lines.rfind('\n') + 1);
  return begins_with(line, "error: ") ? line.substr(7) : line;
}

static Words trainer_of(const Experiment& e, const Group& g, const Arm& a, int64_t steps) {
  Words command = {e.trainer, "--keep", "1"};
  if (!e.data.empty()) append(command, {"-i", e.data + "/train_*.bin", "-j", e.data + "/val_*.bin"});
  append(command, g.options), append(command, a.options);
  if (steps > 0) append(command, {"-x", std::to_string(steps)});
  append(command, e.more), append(command, {"--wiring", a.wiring});
  return command;
}

// What the trainer says of an arm: its updates, its FLOPs, the memory that it needs.
static json plan_of(const Experiment& e, const Group& g, const Arm& a) {
  Words command = trainer_of(e, g, a, g.steps);
  append(command, {"-o", e.out + "/.plan", "--dry-run", "--json"});
  const Printed printed = run(command);
  if (printed.status != 0)
    user_error("%s: the trainer refuses its options, as it says above", joined({a.folder, a.wiring}, ", "));
  const json plan = parse_json(printed.text);
  if (!plan.is_object())
    user_error("%s: its --dry-run --json is no plan; is it a trainer of these sources?", e.trainer);
  return plan;
}

// Makes the examples of a probe, and adds what follows from them: their options, the level and chance.
static void make_probe(const Experiment& e, Group& g) {
  const std::string folder = e.out + "/data/" + g.name;
  make_folders(e.out + "/data");
  Words command = words_of("data/probe " + g.probe), task = words_of(g.probe);
  append(command, {"-o", folder, "--examples", "64000", "--val-examples", "500"});
  if (run(command).status != 0) user_error("probes: '%s': data/probe cannot make it", g.probe);
  const json made = parse_json(read_whole_file(folder + "/MANIFEST.json"));
  const std::string T = made.at("seq_len").dump(), harder = made.at("harder");
  append(g.options, {"-i", folder + "/train_*.bin", "-j", folder + "/val_*.bin", "-t", T, "--max-seq-len", T,
                     "--vocab-size", made.at("vocab_size").dump(), "--tokenizer", "none"});
  for (const std::string& of_level : {std::string("-t"), "--" + harder})
    if (const auto at = std::find(task.begin(), task.end(), of_level); at != task.end()) task.erase(at, at + 2);
  g.text = format("level %s of %s --%s\nchance %s", made.at("parameters").at(harder).dump().c_str(),
                  joined(task, " ").c_str(), harder.c_str(), made.at("chance_in_context").dump().c_str());
}

// ----------------------------------------------------------------------------
// What has been done, and what is to be done

struct ARun {
  std::string folder, said;
  Words command;
  int64_t steps;
};

static ARun run_of(const Experiment& e, const Group& g, const Arm& a, const std::string& rate, int64_t seed) {
  const std::string number = std::to_string(seed);
  ARun r = {joined({e.out, a.folder, rate, a.name + "-" + number}, "/"),
            joined({a.folder, a.wiring, rate, "seed " + number}, ", "), trainer_of(e, g, a, a.steps), a.steps};
  if (!rate.empty()) append(r.command, {"-l", rate});
  append(r.command, {"--seed", number, "-o", r.folder, "-y"});
  return r;
}

static bool has_begun(const ARun& r) { return path_exists(r.folder + "/log.jsonl"); }

// The last validation loss of a run that has come to its end, NaN without a validation; none before.
static std::optional<double> final_loss(const ARun& r) {
  static std::map<std::string, double> known;
  if (const auto found = known.find(r.folder); found != known.end()) return found->second;
  if (!has_begun(r)) return {};
  const RunHistory history = read_run(r.folder, /*with_positions=*/false);
  // An archive of results may have only some of the updates' lines.
  const int64_t done = history.validations.empty() ? history.last_step() : history.validations.back().step;
  // Checkpoints may have been removed since. An archive of results has none, and no lock.
  const auto checkpoints = checkpoints_in(r.folder);
  const bool was_saved = history.has_saved || !path_exists(r.folder + "/lock");
  const int64_t saved = !checkpoints.empty() ? checkpoints.rbegin()->first : was_saved ? r.steps : 0;
  if (std::min(done, saved) < r.steps) return {};
  return known[r.folder] = history.final_loss();
}

struct RateSearch {
  std::vector<std::pair<double, std::string>> tried;  // losses and rates, the best first
  Words open;                                         // to be tried next; none: the first of `tried` is the best
  std::string best() const { return tried.empty() ? "" : tried[0].second; }
};

// The middle rate is tried first, then those beside the best until it has worse ones on both sides, as far as there are
// any. One that failed is worse than all others, unless it was killed: then the search stays open.
static RateSearch search(const Experiment& e, const Group& g, const Arm& a) {
  RateSearch s;
  if (g.rates.empty()) return s;
  const auto loss_of = [&](const std::string& rate) {
    const ARun r = run_of(e, g, a, rate, g.search_seed);
    const auto failed = e.failed.find(r.folder);
    const bool is_worst = failed != e.failed.end() && failed->second < 128;
    const std::optional<double> loss = is_worst ? INFINITY : final_loss(r);
    if (loss && std::isnan(*loss)) user_error("%s: has no validation loss, by which rates are compared", r.folder);
    return loss;
  };
  for (const std::string& rate : g.rates)
    if (const auto loss = loss_of(rate)) s.tried.push_back({*loss, rate});
  std::stable_sort(s.tried.begin(), s.tried.end(), [](auto& x, auto& y) { return x.first < y.first; });
  if (s.tried.empty()) return s.open = {g.rates[(g.rates.size() - 1) / 2]}, s;
  const size_t best = size_t(std::find(g.rates.begin(), g.rates.end(), s.best()) - g.rates.begin());
  for (size_t i = best > 0 ? best - 1 : 0; i < std::min(best + 2, g.rates.size()); i++)
    if (!loss_of(g.rates[i])) s.open.push_back(g.rates[i]);
  return s;
}

struct Left {
  std::vector<ARun> runs;  // as far as they are known: the seeds of an arm follow when its best rate is known
  int64_t later = 0;       // how many follow
};

static Left runs_left(const Experiment& e) {
  Left left;
  std::set<std::string> folders;
  const auto add = [&](const ARun& r) {
    if (!final_loss(r) && folders.insert(r.folder).second) left.runs.push_back(r);
  };
  for (const Group& g : e.groups) {
    std::vector<RateSearch> searches;
    for (const Arm& a : g.arms) {
      searches.push_back(search(e, g, a));
      for (const std::string& rate : searches.back().open) add(run_of(e, g, a, rate, g.search_seed));
      if (!searches.back().open.empty()) left.later += g.last_seed - g.first_seed + 1;
    }
    for (int64_t seed = g.first_seed; seed <= g.last_seed; seed++)
      for (size_t i = 0; i < g.arms.size(); i++)
        if (searches[i].open.empty()) add(run_of(e, g, g.arms[i], searches[i].best(), seed));
  }
  return left;
}

static const std::string outline_begins = "# What this is\n";

// The page of all runs that have begun; without a file one comparison. Returns whether it was written.
static bool write_page(const Experiment& e) {
  std::string outline = outline_begins + e.about + "\n";
  Words begun;
  for (const Group& g : e.groups) {
    outline += "# " + g.title + "\n" + g.text + "\n";
    for (const Arm& a : g.arms) {
      const RateSearch s = search(e, g, a);
      if (!g.rates.empty()) outline += a.wiring + (s.open.empty() ? ": the first is taken" : ": rates are being tried");
      for (const auto& [loss, rate] : s.tried) outline += format("; %s: %.4f", rate.c_str(), loss);
      outline += "\n";
      for (int64_t seed = g.first_seed; seed <= g.last_seed && s.open.empty(); seed++)
        if (const ARun r = run_of(e, g, a, s.best(), seed); has_begun(r)) {
          begun.push_back(r.folder);
          outline += "run " + r.folder + "\n" + (a.published.empty() ? "" : "published " + a.published + "\n");
        }
    }
  }
  if (begun.empty()) return false;
  if (!e.file.empty())
    write_file_durably(e.out + "/outline.txt", outline), begun = {"--outline", e.out + "/outline.txt"};
  begun.insert(begun.begin(), {"./report", "-o", e.out + "/compare.html"});
  return run(begun).status == 0;
}

// Sets the number of updates of each arm, by what the trainer says; returns how many runs have room in memory. Throws
// UserError where two arms with other options would have the same folder.
static int64_t plan_arms(Experiment& e) {
  int64_t room = INT64_MAX;
  std::map<std::string, Words> arms;
  const auto number = [](const json& plan, const char* key) { return plan.at(key).get<double>(); };
  for (Group& g : e.groups) {
    const json first = g.equal_flops.empty() ? json() : plan_of(e, g, {g.equal_flops, "", "", "", {}});
    for (Arm& a : g.arms) {
      const json plan = plan_of(e, g, a);
      double updates = number(plan, "steps");
      if (!first.is_null())
        updates = number(first, "steps") * number(first, "flops_per_token") / number(plan, "flops_per_token");
      a.steps = std::llround(updates);
      room = std::min(room, int64_t(number(plan, "memory_free") / number(plan, "memory_needed")));
      Words rates = g.rates;
      rates.push_back("");  // runs of some rate, and others of none, would be two arms of a name
      for (const std::string& rate : rates) {
        const ARun r = run_of(e, g, a, rate, /*seed=*/0);
        if (arms.emplace(r.folder, r.command).first->second != r.command)
          user_error("two are called %s, and have other options; give their groups other names",
                     joined({a.folder, rate, a.name}, "/"));
      }
    }
  }
  return std::max<int64_t>(room, 1);
}

// Whether the runs that are here already were made with the same options and data; says of each what differs.
static bool fit_what_is_here(const Experiment& e) {
  bool all_fit = true;
  std::set<std::string> seen;  // the seed of the search is mostly one of the others
  for (const Group& g : e.groups)
    for (const Arm& a : g.arms)
      for (const std::string& rate : g.rates.empty() ? Words{""} : g.rates)
        for (int64_t i = g.first_seed; i <= g.last_seed + 1; i++) {
          ARun r = run_of(e, g, a, rate, i <= g.last_seed ? i : g.search_seed);
          if (!has_begun(r) || !seen.insert(r.folder).second) continue;
          append(r.command, {"--same-options", "--dry-run"});
          if (const Printed printed = run(r.command, true); printed.status != 0)
            all_fit = false, print_error(r.said + ": " + last_line(printed.text));
        }
  return all_fit;
}

// ----------------------------------------------------------------------------
// Running

struct Slot {     // on a machine with several GPUs one of them
  pid_t pid = 0;  // 0: free
  ARun run = {};
};

static bool is_busy(const std::vector<Slot>& slots) {
  return std::any_of(slots.begin(), slots.end(), [](const Slot& slot) { return slot.pid > 0; });
}

// Starts runs in all free slots; returns whether any is busy.
static bool fill(const Experiment& e, std::vector<Slot>& slots, const Words& gpus) {
  const int64_t cores = std::thread::hardware_concurrency();
  const std::vector<ARun> left = runs_left(e).runs;
  const auto can_start = [&](const ARun& r) {
    const auto has_it = [&](const Slot& slot) { return slot.pid > 0 && slot.run.folder == r.folder; };
    return e.failed.count(r.folder) == 0 && std::none_of(slots.begin(), slots.end(), has_it);
  };
  for (size_t i = 0; i < slots.size(); i++) {
    if (slots[i].pid > 0) continue;
    const auto next = std::find_if(left.begin(), left.end(), can_start);
    if (next == left.end()) break;
    make_folders(parent_folder(next->folder));
    const std::string path = next->folder + ".txt";
    const FileDescriptor text(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
    if (text.fd < 0) user_error("%s: cannot be written: %s", path, strerror(errno));
    std::map<std::string, std::string> variables;
    if (gpus.size() > 1) variables["CUDA_VISIBLE_DEVICES"] = gpus[i % gpus.size()];
    if (gpus.empty() && getenv("OMP_NUM_THREADS") == nullptr)
      variables["OMP_NUM_THREADS"] = std::to_string(std::max<int64_t>(1, cores / int64_t(slots.size())));
    slots[i] = {start(next->command, text.fd, /*all=*/true, /*alone=*/true, variables), *next};
  }
  return is_busy(slots);
}

static int run_all(Experiment& e, int64_t jobs, const Words& gpus) {
  sigset_t signals = stop_signals();
  sigaddset(&signals, SIGCHLD);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  std::vector<Slot> slots(static_cast<size_t>(jobs));
  const double began = seconds_now();
  int64_t done = 0;
  int stopped = 0;  // by which signal
  while (stopped ? is_busy(slots) : fill(e, slots, gpus)) {
    const int signal = sigwaitinfo(&signals, nullptr);
    if (signal > 0 && signal != SIGCHLD) stopped = signal;
    for (auto& [pid, r] : slots) {
      int status = 0;
      if (pid > 0 && stopped && signal == stopped) kill(pid, SIGUSR1);
      if (pid == 0 || waitpid(pid, &status, WNOHANG) <= 0) continue;
      pid = 0;
      if (const auto loss = final_loss(r); loss && status == 0) {
        const Left left = runs_left(e);
        const double more = double(left.runs.size()) + double(left.later);
        const std::string said = std::isnan(*loss) ? "no validation" : format("validation loss %.5f", *loss);
        printf("%s: %s after step %lld; %g runs are left, about %s\n", r.said.c_str(), said.c_str(), (long long)r.steps,
               more, time_text((seconds_now() - began) / double(++done) * more).c_str());
        fflush(stdout);
      } else if (!stopped) {
        const std::string printed = last_line(read_whole_file(r.folder + ".txt", most_text_bytes));
        print_error(format("%s: ended with status %d: ", r.said.c_str(), exit_status(status)) + printed);
        e.failed[r.folder] = exit_status(status);
      }
      write_page(e);
    }
  }
  const bool has_page = write_page(e);
  if (stopped) return fprintf(stderr, "stopped; the same command resumes\n"), 128 + stopped;
  const std::string others = has_page ? "; the others are in " + e.out + "/compare.html" : "";
  if (!e.failed.empty()) user_error("%zu runs failed%s", e.failed.size(), others);
  if (!has_page) user_error("%s/compare.html: is not of these runs, as is said above", e.out);
  printf("%s/compare.html\n", e.out.c_str());
  return 0;
}

static bool parse_arguments(int argc, char** argv, Experiment& e) {
  CLI::App app("Trains wirings over seeds and learning rates, and compares them on a page, OUT/compare.html. After -- "
               "come options of the trainer for all runs. The same command continues where it was stopped.\n"
               "Example: ./experiment --wirings 'plain; sla(9,9)' --seeds 3 -- -i 'data/gcide/train_*.bin' -x 1000");
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("FILE", e.file, "the experiment (scripts/experiments/*.toml); none: --wirings and --seeds say it");
  app.add_option("--wirings", e.wirings, "arms in place of the file's, with ; between them");
  app.add_option("--seeds", e.seeds, "how many, from 1 on, or FIRST:LAST");
  app.add_option("--steps", e.steps, "updates of a run; where FLOPs are equal, of the wiring that has them");
  app.add_option("--data", e.data, "a folder with train_*.bin and val_*.bin, in place of the file's");
  app.add_option("--only", e.only, "only these groups of the file, with , between them");
  app.add_option("-o,--out", e.out, "the folder of all runs; default: runs/ and the name of the file, or compare");
  app.add_option("--jobs", e.jobs, "runs at a time; default: one a GPU, or a core as far as there is memory");
  app.add_option("--trainer", e.trainer, "default: ./train_gpt2_sla where there is a GPU, else ./train_gpt2_sla_cpu");
  app.add_flag("--dry-run", e.dry_run,
               "print the runs that are left, as far as they are known, and end; of probes, makes their examples "
               "first");
  char** const end = std::find(argv, argv + argc, std::string("--"));
  if (end != argv + argc) e.more.assign(end + 1, argv + argc);
  if (!parse_command_line(app, int(end - argv), argv)) return false;
  for (const auto& [name, value] : {std::pair("--steps", e.steps), {"--jobs", e.jobs}})
    if (app.count(name) > 0 && value < 1) user_error("%s %lld: it must be at least 1", name, (long long)value);
  if (e.out.empty()) e.out = "runs/" + (e.file.empty() ? "compare" : std::filesystem::path(e.file).stem().string());
  return true;
}

// The machine's GPUs, as CUDA_VISIBLE_DEVICES names them: those that it names already, or all, by number.
static Words visible_gpus() {
  const int64_t count = atol(run({"sh", "-c", "nvidia-smi -L 2>/dev/null | grep -c '^GPU'"}).text.c_str());
  Words gpus;
  for (int64_t i = 0; i < count; i++) gpus.push_back(std::to_string(i));
  if (const char* names = getenv("CUDA_VISIBLE_DEVICES"); names != nullptr && count > 0) gpus = words_of(names, ',');
  if (!gpus.empty() && gpus[0] == "-1") gpus.clear();
  return gpus;
}

static int run_experiment(int argc, char** argv) {
  Experiment e;
  if (!parse_arguments(argc, argv, e)) return 0;
  const std::string make_data = read_experiment(e);
  const Words gpus = visible_gpus();
  if (e.trainer.empty()) e.trainer = gpus.empty() ? "train_gpt2_sla_cpu" : "train_gpt2_sla";
  if (e.trainer.find('/') == std::string::npos) e.trainer = "./" + e.trainer;
  for (const std::string& program : {e.trainer, std::string("./report")})
    if (access(program.c_str(), X_OK) != 0) user_error("%s: is not here; make builds it, in the sources", program);
  const auto has_data = [&] { return e.data.empty() || !matching_files(e.data + "/train_*.bin").empty(); };
  if (!has_data() && e.dry_run && !make_data.empty())
    user_error("%s: has no train_*.bin; %s makes them, which --dry-run does not", e.data, make_data);
  if (!has_data() && (make_data.empty() || run({"sh", "-c", make_data}).status != 0 || !has_data()))
    user_error("%s: has no train_*.bin; data/README.md says how to make some", e.data);
  for (Group& g : e.groups)
    if (!g.probe.empty()) make_probe(e, g);
  const int64_t room = plan_arms(e), cores = std::thread::hardware_concurrency();
  RunLock lock;  // a run that another experiment trains would be taken for one that failed
  if (!e.dry_run) make_folders(e.out), lock.take(e.out);
  const std::string outline = try_read_file(e.out + "/outline.txt").value_or("");
  if (!outline.empty() && !begins_with(outline, outline_begins))
    user_error("%s/outline.txt: is no experiment's; name another folder (-o)", e.out);
  if (!fit_what_is_here(e)) return 2;
  const std::vector<ARun> left = runs_left(e).runs;
  for (const ARun& r : left)
    if (e.dry_run) printf("%s: %lld updates\n", r.said.c_str(), (long long)r.steps);
  if (e.dry_run) return 0;
  const int64_t fit =
      !gpus.empty() ? int64_t(gpus.size()) : std::min({cores, room, std::max<int64_t>(1, int64_t(left.size()))});
  return run_all(e, e.jobs > 0 ? e.jobs : fit, gpus);
}

int main(int argc, char** argv) {
  return run_program([&] { return run_experiment(argc, argv); });
}
