// Can the tests fail? Derives mutants from source files, plants one after another in a copy of the tree, builds the
// tests that cover the file and runs them. A mutant that all of them pass is a survivor: a test is missing, or the
// mutant changes nothing. `make mutants`; dev/README.md says how to read what it prints.
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>
#include "dev/test/mutants/bugs.h"
#include "dev/test/mutants/derive.h"
#include "dev/test/mutants/tests.h"
#include "llmc/base/clock.h"
#include "llmc/base/error.h"

namespace fs = std::filesystem;
using mutants::Mutant, mutants::TestRun, mutants::WrittenBug;

static const char usage[] =
    "usage: build/mutants [options] FILE...\n"
    "  FILE...              source files, from the repository's root, of which mutants are derived\n"
    "  --changed REF        also those that have changed since a commit and that some test covers\n"
    "  --bugs               also the bugs that dev/test/bugs has for tests\n"
    "  --sample N           only N of all mutants, drawn at random\n"
    "  --seed N             of that draw (1)\n"
    "  --only TEXT          only mutants whose kind, place, changed line or first test holds TEXT\n"
    "  --list               print the mutants, and run nothing\n"
    "  --test PROGRAM[:FILTER]  run these tests of build/PROGRAM, in place of those of the programs that include "
    "the file; may be repeated\n"
    "  --equivalent FILE    the mutants that are known to change nothing (dev/test/mutants/equivalent.txt)\n"
    "  -j N                 try N mutants at a time, each in a copy of its own (1)\n";

struct Options {
  std::vector<std::string> files;
  std::string changed_since, only, equivalent = "dev/test/mutants/equivalent.txt";
  std::vector<TestRun> tests;
  bool bugs = false, list = false;
  size_t sample = 0;  // 0: all
  uint64_t seed = 1;
  int jobs = 1;
};

// A mutant of a file, with what it is judged by.
struct Trial {
  std::string file;
  Mutant mutant;
  std::vector<TestRun> tests;
  int line;
  std::string before, after;  // the lines that it changes

  std::string place() const { return format("%s:%d", file.c_str(), line); }
  std::string first_test() const { return tests[0].program + " " + tests[0].filter; }
};

// Quick to build is what counts here. The test programs of the emulated GPU run twice as fast with -O1 as with -O0.
static const char make_flags[] = "OPTIMIZE='-O1 -march=native -fno-math-errno -fno-trapping-math -ffp-contract=fast' "
                                 "EMU_OPTIMIZE=-O1";
// A test takes too long after this many times what it takes without a mutant, and these many seconds more.
constexpr double patience = 10, patience_seconds = 20;
constexpr double longest_build = 900;  // seconds

// ----------------------------------------------------------------------------
// Files and processes

static std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file || fs::is_directory(path))
    user_error("%s: cannot be read; name a source file, from the repository's root", path.c_str());
  return {std::istreambuf_iterator<char>(file), {}};
}

static void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  file << bytes;
  if (!file.flush()) user_error("%s: cannot be written; is the disk full?", path.c_str());
}

static volatile sig_atomic_t interrupted = 0;
static void interrupt(int) { interrupted = 1; }

struct Interrupted {};

struct Finished {
  bool timed_out = false;
  int exit_status = 0;  // 128 + the signal that ended it
  double seconds = 0;
  std::string output;  // stdout and stderr
};

// Runs a shell's command in `folder`, as a process group of its own, which is killed after `seconds` or when this
// program is interrupted.
static Finished run(const std::string& command, const std::string& folder, double seconds) {
  const std::string log = folder + "/.output";
  Finished result;
  const double start = seconds_now();
  const pid_t child = fork();
  if (child < 0) user_error("cannot start a process: %s", strerror(errno));
  if (child == 0) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int out = open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), in = open("/dev/null", O_RDONLY);
    if (chdir(folder.c_str()) != 0 || dup2(out, 1) < 0 || dup2(out, 2) < 0 || dup2(in, 0) < 0) _exit(127);
    execl("/bin/sh", "sh", "-c", command.c_str(), static_cast<char*>(nullptr));
    _exit(127);
  }
  setpgid(child, child);  // whichever of the two comes first
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    result.timed_out = seconds_now() - start > seconds;
    if (result.timed_out || interrupted) {
      kill(-child, SIGKILL);
      waitpid(child, &status, 0);
      break;
    }
    usleep(10000);
  }
  kill(-child, SIGKILL);  // what it has left running
  if (interrupted) throw Interrupted();
  result.seconds = seconds_now() - start;
  result.exit_status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  result.output = read_file(log);
  return result;
}

// The lines that a command of git prints here.
static std::vector<std::string> git(const std::string& arguments) {
  FILE* pipe = popen(("git " + arguments).c_str(), "r");
  std::string text;
  for (int c; pipe != nullptr && (c = fgetc(pipe)) != EOF;) text += char(c);
  if (pipe == nullptr || pclose(pipe) != 0)
    user_error("git %s: failed; run this in the repository's root, with a commit it knows", arguments.c_str());
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// The files of the working tree that git does not ignore; each once, where a merge is not finished, too.
static std::set<std::string> files_of_tree(const std::string& patterns = "") {
  std::set<std::string> files;
  for (const std::string& file : git("-c core.quotePath=false ls-files -co --exclude-standard " + patterns))
    if (fs::is_regular_file(fs::symlink_status(file))) files.insert(file);  // others are removed, and not yet committed
  return files;
}

// A folder that is gone when the program ends.
struct TemporaryFolder {
  std::string path = (fs::temp_directory_path() / "mutants_XXXXXX").string();
  TemporaryFolder() {
    if (mkdtemp(path.data()) == nullptr) user_error("%s: cannot be made: %s", path.c_str(), strerror(errno));
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
};

// Copies the working tree, without what git ignores.
static void copy_tree(const std::string& to) {
  for (const std::string& file : files_of_tree()) {
    fs::create_directories(fs::path(to + "/" + file).parent_path());
    fs::copy_file(file, to + "/" + file);
  }
}

// ----------------------------------------------------------------------------
// Which mutants

static Options parse(int argc, char** argv) {
  Options o;
  const auto number = [](const std::string& option, const std::string& text) {
    if (text.empty() || text.size() > 9 || text.find_first_not_of("0123456789") != std::string::npos)
      user_error("%s %s: is no number; give one from 0 on", option.c_str(), text.c_str());
    return std::stoi(text);
  };
  for (int i = 1; i < argc; i++) {
    const std::string option = argv[i];
    const auto value = [&] {
      if (++i == argc) user_error("%s: its value is missing\n%s", option.c_str(), usage);
      return std::string(argv[i]);
    };
    if (option == "--list") o.list = true;
    else if (option == "--bugs") o.bugs = true;
    else if (option == "--changed") o.changed_since = value();
    else if (option == "--sample") o.sample = size_t(number(option, value()));
    else if (option == "--seed") o.seed = uint64_t(number(option, value()));
    else if (option == "--only") o.only = value();
    else if (option == "--equivalent") o.equivalent = value();
    else if (option == "-j") o.jobs = std::max(1, number(option, value()));
    else if (option.rfind("-j", 0) == 0) o.jobs = std::max(1, number("-j", option.substr(2)));  // as make takes it
    else if (option == "--test") {
      const std::string test = value();
      const size_t colon = std::min(test.find(':'), test.size());
      o.tests.push_back({"build/" + test.substr(0, colon), colon < test.size() ? test.substr(colon + 1) : "*"});
    } else if (option[0] == '-') user_error("%s: no such option\n%s", option.c_str(), usage);
    else o.files.push_back(option);
  }
  if (o.files.empty() && o.changed_since.empty() && !o.bugs)
    user_error("nothing to do; name files, --changed or --bugs\n%s", usage);
  return o;
}

static bool is_source(const std::string& path) {
  const std::string ending = fs::path(path).extension();
  return ending == ".h" || ending == ".cpp" || ending == ".cu";
}

// The files of the options, each once.
static std::set<std::string> files_to_mutate(const Options& o) {
  std::set<std::string> files(o.files.begin(), o.files.end());
  for (const std::string& file : files) {
    if (!is_source(file))
      user_error("%s: is no C++ source; mutants are derived from .h, .cpp and .cu files", file.c_str());
    if (o.tests.empty() && mutants::tests_of_tree().tests_of(file).empty())
      user_error("%s: no test covers it; name one (--test)", file.c_str());
  }
  if (o.changed_since.empty()) return files;
  for (const std::string& file :
       git("-c core.quotePath=false diff --name-only --diff-filter=d '" + o.changed_since + "' --")) {
    if (!is_source(file) || files.count(file)) continue;
    if (mutants::tests_of_tree().tests_of(file).empty()) printf("no test covers it: %s\n", file.c_str());
    else files.insert(file);
  }
  return files;
}

static Trial make_trial(const std::string& file, const std::string& source, const Mutant& m,
                        std::vector<TestRun> tests) {
  const auto [before, after] = mutants::changed_lines(source, m);
  return {file, m, std::move(tests), mutants::line_of(source, m.begin), before, after};
}

// All that the options ask for, in the order of files and places.
static std::vector<Trial> find_trials(const Options& o) {
  std::vector<Trial> trials;
  for (const std::string& file : files_to_mutate(o)) {
    const std::string source = read_file(file);
    const std::vector<TestRun> tests = o.tests.empty() ? mutants::tests_of_tree().tests_of(file) : o.tests;
    for (const Mutant& m : mutants::derive_mutants(source)) trials.push_back(make_trial(file, source, m, tests));
  }
  if (o.bugs)
    for (const std::string& bugs_file : files_of_tree("dev/test/bugs")) {
      for (const WrittenBug& bug : mutants::collect_bugs(bugs_file, read_file(bugs_file))) {
        const std::string source = read_file(bug.file);
        trials.push_back(make_trial(bug.file, source, mutants::locate_bug(bug, source), {{bug.program, bug.filter}}));
      }
    }
  if (!o.only.empty()) {
    const auto is_other = [&](const Trial& t) {
      return (t.mutant.kind + (" " + t.place()) + " " + t.before + " " + t.first_test()).find(o.only) ==
             std::string::npos;
    };
    trials.erase(std::remove_if(trials.begin(), trials.end(), is_other), trials.end());
  }
  if (trials.empty()) user_error("no mutants; nothing in these files can be changed, or --only fits none");
  return trials;
}

// `n` of them, in the order that they had.
static std::vector<Trial> draw_sample(const std::vector<Trial>& trials, size_t n, uint64_t seed) {
  std::vector<size_t> places(trials.size());
  for (size_t i = 0; i < places.size(); i++) places[i] = i;
  std::mt19937_64 random(seed);
  n = std::min(n, places.size());
  for (size_t i = 0; i < n; i++) std::swap(places[i], places[i + random() % (places.size() - i)]);
  std::sort(places.begin(), places.begin() + long(n));
  std::vector<Trial> sample;
  for (size_t i = 0; i < n; i++) sample.push_back(trials[places[i]]);
  return sample;
}

// The mutants that are known to change nothing: file, line before, line after -> why.
using Equivalent = std::map<std::vector<std::string>, std::string>;

// Each is four lines, as survivors are printed; the last says why.
static Equivalent read_equivalent(const std::string& path) {
  Equivalent known;
  if (!fs::exists(path)) return known;
  std::istringstream lines(read_file(path));
  std::vector<std::string> entry;
  std::string line;
  for (int n = 1;; n++) {
    const bool more = bool(std::getline(lines, line));
    if (more && line[0] == '#') continue;
    if (more && !line.empty()) {
      entry.push_back(line);
      continue;
    }
    if (!entry.empty()) {
      if (entry.size() != 4 || entry[1].compare(0, 2, "- ") != 0 || entry[2].compare(0, 2, "+ ") != 0)
        user_error("%s:%d: the entry above is not four lines; write the file, `- line`, `+ line` and why it changes "
                   "nothing",
                   path.c_str(), n);
      known[{entry[0], entry[1].substr(2), entry[2].substr(2)}] = entry[3];
      entry.clear();
    }
    if (!more) return known;
  }
}

// Names the entries that are of none of the mutants of these files: the line has changed since.
static void print_outdated(const Equivalent& equivalent, const std::vector<Trial>& trials) {
  std::set<std::string> files;
  std::set<std::vector<std::string>> mutants;
  for (const Trial& t : trials) files.insert(t.file), mutants.insert({t.file, t.before, t.after});
  for (const auto& [mutant, reason] : equivalent)
    if (files.count(mutant[0]) && !mutants.count(mutant))
      printf("no longer a mutant, remove it from the list of those that change nothing: %s\n- %s\n+ %s\n",
             mutant[0].c_str(), mutant[1].c_str(), mutant[2].c_str());
}

// ----------------------------------------------------------------------------
// What becomes of them

enum class Outcome { did_not_compile, killed, same_program, survived };

struct Verdict {
  Outcome outcome;
  std::string by;  // which a killed one was
};

// A copy of the tree in which mutants are planted. Two of them share nothing.
class Workplace {
 public:
  explicit Workplace(std::string folder) : folder_(std::move(folder)) {}

  // Builds the tests of the trials without a mutant and runs them: they must pass. Keeps how long they took.
  void prepare(const std::vector<Trial>& trials) {
    for (const Trial& t : trials)
      for (const TestRun& test : t.tests) {
        if (!built_.count(test.program)) {
          const Finished done = build(test.program);
          if (done.exit_status != 0)
            user_error("%s: does not build without a mutant either; repair the tree first\n%s", test.program.c_str(),
                       last_lines(done).c_str());
          built_[test.program] = hash_of(test.program);
        }
        if (!seconds_.count(key(test))) time_without_mutant(test);
      }
  }

  // Like another one that is prepared: a copy of it, with what is built.
  void prepare_like(const Workplace& other) {
    fs::remove_all(folder_);
    const Finished copied = run("cp -a '" + other.folder_ + "' '" + folder_ + "'", other.folder_, longest_build);
    if (copied.exit_status != 0) user_error("%s: cannot be copied: %s", other.folder_.c_str(), copied.output.c_str());
    seconds_ = other.seconds_;
    built_ = other.built_;
  }

  Verdict judge(const Trial& t) {
    const std::string path = folder_ + "/" + t.file, source = read_file(path);
    write_file(path, source.substr(0, t.mutant.begin) + t.mutant.text + source.substr(t.mutant.end));
    const Verdict verdict = judge_planted(t);
    write_file(path, source);  // with a new time, so that make builds it again
    return verdict;
  }

 private:
  static std::string key(const TestRun& test) { return test.program + " " + test.filter; }

  static std::string last_lines(const Finished& f) {
    return f.output.substr(f.output.size() - std::min<size_t>(f.output.size(), 2000));
  }

  Finished build(const std::string& program) const {
    std::string command = "make -s " + std::string(make_flags) + " " + program;
    for (const std::string& beside : mutants::tests_of_tree().programs_run_by(program)) command += " " + beside;
    return run(command, folder_, longest_build);
  }

  // A number that tells the bytes of a test program, and of those that it runs, from others.
  size_t hash_of(const std::string& program) const {
    std::string bytes = read_file(folder_ + "/" + program);
    for (const std::string& beside : mutants::tests_of_tree().programs_run_by(program))
      bytes += read_file(folder_ + "/" + beside);
    return std::hash<std::string>()(bytes);
  }

  Finished test(const TestRun& test, double seconds) const {
    return run("exec " + test.program + " --gtest_filter='" + test.filter + "'", folder_, seconds);
  }

  void time_without_mutant(const TestRun& which) {
    const Finished done = test(which, 3600);
    if (done.exit_status != 0)
      user_error("%s %s: fails without a mutant; repair the tree first\n%s", which.program.c_str(),
                 which.filter.c_str(), last_lines(done).c_str());
    if (!which.may_be_empty && done.output.find("[  PASSED  ] 0 tests.") != std::string::npos)
      user_error("%s: %s fits none of its tests; name others", which.program.c_str(), which.filter.c_str());
    seconds_[key(which)] = done.seconds;
    printf("%7.1f s  %s %s\n", done.seconds, which.program.c_str(), which.filter.c_str());
    fflush(stdout);
  }

  Verdict judge_planted(const Trial& t) const {
    // As without the mutant: a program that need not run. What no compiler reads, such as a script, changes none.
    std::map<std::string, bool> is_same;
    for (const TestRun& which : t.tests) {
      if (!is_same.count(which.program)) {
        if (build(which.program).exit_status != 0) return {Outcome::did_not_compile, ""};
        is_same[which.program] = is_source(t.file) && hash_of(which.program) == built_.at(which.program);
      }
      if (is_same[which.program]) continue;
      const Finished done = test(which, patience_seconds + patience * seconds_.at(key(which)));
      if (done.timed_out) return {Outcome::killed, "a time-out of " + which.program};
      if (done.exit_status != 0) return {Outcome::killed, first_failure(done, which)};
    }
    for (const auto& [program, same] : is_same)
      if (!same) return {Outcome::survived, ""};
    return {Outcome::same_program, ""};
  }

  static std::string first_failure(const Finished& done, const TestRun& which) {
    const char failed[] = "[  FAILED  ] ", began[] = "[ RUN      ] ";
    const size_t at = done.output.find(failed), last = done.output.rfind(began);
    if (at != std::string::npos) {
      const size_t begin = at + strlen(failed);
      return done.output.substr(begin, done.output.find_first_of(" ,\n", begin) - begin);
    }
    const std::string how =
        done.exit_status > 128 ? format("signal %d", done.exit_status - 128) : format("status %d", done.exit_status);
    if (last == std::string::npos) return "an end with " + how + " of " + which.program;
    const size_t begin = last + strlen(began);
    return "an end with " + how + " in " + done.output.substr(begin, done.output.find('\n', begin) - begin);
  }

  std::string folder_;
  std::map<std::string, double> seconds_;  // of a test run without a mutant
  std::map<std::string, size_t> built_;    // hash_of a test program without a mutant
};

static void print_trial(const char* what, const Trial& t, const std::string& how) {
  const std::string test = strcmp(t.mutant.kind, "bug") == 0 ? " for " + t.first_test() : "";
  printf("%s%s (%s%s)%s\n- %s\n+ %s\n", what, t.place().c_str(), t.mutant.kind, test.c_str(), how.c_str(),
         t.before.c_str(), t.after.c_str());
  fflush(stdout);
}

// The tests of each file, in the order in which they are run.
static void print_tests(const std::vector<Trial>& trials) {
  std::set<std::string> files;
  for (const Trial& t : trials) {
    if (strcmp(t.mutant.kind, "bug") == 0 || !files.insert(t.file).second) continue;
    printf("%s is tried by\n", t.file.c_str());
    for (const TestRun& test : t.tests) printf("  %s %s\n", test.program.c_str(), test.filter.c_str());
  }
}

// What was found out about all mutants so far.
struct Tally {
  int tried = 0, did_not_compile = 0, killed = 0, same_program = 0, known = 0;
  std::vector<Trial> survivors;

  void add(const Trial& t, const Verdict& v, const Equivalent& equivalent) {
    tried++;
    const auto reason = equivalent.find({t.file, t.before, t.after});
    switch (v.outcome) {
      case Outcome::did_not_compile: did_not_compile++, print_trial("did not compile: ", t, ""); break;
      case Outcome::killed: killed++, print_trial("killed: ", t, " by " + v.by); break;
      case Outcome::same_program: same_program++, print_trial("the same program: ", t, ""); break;
      case Outcome::survived:
        if (reason != equivalent.end()) known++, print_trial("changes nothing: ", t, " " + reason->second);
        else survivors.push_back(t), print_trial("SURVIVED: ", t, "");
    }
  }

  void print(size_t all) const {
    if (!survivors.empty()) printf("\nSurvivors\n");
    for (const Trial& t : survivors) print_trial("", t, "");
    printf("\n%d mutants of %zu: %d killed, %zu survived, %d known to change nothing, %d that compile to the same "
           "program, "
           "%d that do not compile\n",
           tried, all, killed, survivors.size(), known, same_program, did_not_compile);
  }
};

// Tries all of them, on `jobs` copies of the tree.
static Tally try_all(const std::vector<Trial>& trials, const Equivalent& equivalent, int jobs) {
  const TemporaryFolder folder;
  fs::create_directories(folder.path + "/tmp");
  setenv("TMPDIR", (folder.path + "/tmp").c_str(), 1);  // what a killed test leaves goes with it
  std::vector<Workplace> workplaces;
  for (int i = 0; i < jobs; i++) workplaces.emplace_back(folder.path + "/" + std::to_string(i));
  copy_tree(folder.path + "/0");
  printf("builds and runs the tests without a mutant\n");
  workplaces[0].prepare(trials);
  for (size_t i = 1; i < workplaces.size(); i++) workplaces[i].prepare_like(workplaces[0]);

  Tally tally;
  std::mutex mutex;
  std::atomic<size_t> next{0};
  std::exception_ptr error;
  std::vector<std::thread> threads;
  for (Workplace& workplace : workplaces)
    threads.emplace_back([&] {
      try {
        for (size_t i; (i = next++) < trials.size();) {
          const Verdict verdict = workplace.judge(trials[i]);
          const std::lock_guard<std::mutex> lock(mutex);
          tally.add(trials[i], verdict, equivalent);
        }
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        error = std::current_exception();
        next = trials.size();
      }
    });
  for (std::thread& thread : threads) thread.join();
  if (error) std::rethrow_exception(error);
  return tally;
}

static int run_program(int argc, char** argv) {
  const Options o = parse(argc, argv);
  const std::vector<Trial> all = find_trials(o), trials = o.sample > 0 ? draw_sample(all, o.sample, o.seed) : all;
  const Equivalent equivalent = read_equivalent(o.equivalent);
  if (o.only.empty()) print_outdated(equivalent, all);
  if (o.list) {
    print_tests(trials);
    for (const Trial& t : trials) print_trial("", t, "");
    printf("%zu mutants of %zu\n", trials.size(), all.size());
    return 0;
  }
  const Tally tally = try_all(trials, equivalent, o.jobs);
  tally.print(all.size());
  return tally.survivors.empty() ? 0 : 1;
}

int main(int argc, char** argv) {
  struct sigaction action = {};
  action.sa_handler = interrupt;
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) sigaction(signal, &action, nullptr);
  for (const char* name : {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"})
    unsetenv(name);  // of the make that runs this
  setenv("GTEST_FAIL_FAST", "1", 1);
  setenv("OMP_WAIT_POLICY", "passive", 1);
  setenv("FAULTS_KILLS", "5", 1);  // enough to see a run that does not resume where it was
  try {
    return run_program(argc, argv);
  } catch (const Interrupted&) {
    fprintf(stderr, "interrupted\n");
    return 130;
  } catch (const std::exception& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
