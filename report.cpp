// report: pages of HTML from the folders of runs: one of a single run, a comparison of several; and other files and
// texts that are made of runs. The trainer needs none of it.
#include <CLI/CLI.hpp>
#include <fcntl.h>
#include <unistd.h>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>
#include "llmc/formats/checkpoint.h"
#include "llmc/formats/config_json.h"
#include "llmc/report/event_file.h"
#include "llmc/report/learned_sources.h"
#include "llmc/report/report.h"
#include "llmc/base/clock.h"
#include "llmc/base/command_line.h"
#include "llmc/base/error.h"
#include "llmc/base/files.h"
#include "llmc/base/message.h"
#include "llmc/base/program.h"
#include "llmc/base/utf8.h"

struct ReportOptions {
  std::vector<std::string> folders;
  std::string out, outline, sources;
  bool watch = false, tensorboard = false, suggest_wiring = false;

  bool asks_for_sources() const { return suggest_wiring || !sources.empty(); }
};

// Throws UserError unless the file can be written, and replaces nothing that it is made of.
static void check_replaces_no_input(const std::string& path, const std::vector<std::string>& folders,
                                    std::vector<std::string> inputs) {
  for (const std::string& folder : folders)
    for (const std::string& file : files_of_run(folder)) inputs.push_back(file);
  check_output(path, inputs);
}

static void write_output(const std::string& path, const std::string& text, const std::vector<std::string>& warnings) {
  write_file_durably(path, text);
  for (const std::string& warning : warnings) print_warning(warning);
  printf("wrote %s\n", printable(path, /*one_line=*/true).c_str());
  fflush(stdout);
}

static void report_outline(const ReportOptions& o) {
  if (o.out.empty()) user_error("--outline: name the page, with -o");
  const std::vector<ReportSection> sections = read_outline(o.outline);
  std::vector<std::string> folders, warnings;
  for (const ReportSection& section : sections)
    folders.insert(folders.end(), section.folders.begin(), section.folders.end());
  check_replaces_no_input(o.out, folders, {o.outline});
  const std::string page = sections_page(std::filesystem::path(o.out).stem().string(), sections, &warnings);
  write_output(o.out, page, warnings);
}

static void report_runs(const ReportOptions& o, const std::string& out) {
  std::vector<std::string> warnings;
  std::vector<RunHistory> runs;
  for (const std::string& folder : o.folders) runs.push_back(read_run(folder));
  check_replaces_no_input(out, o.folders, {});
  const std::string text = o.tensorboard      ? event_file(runs[0])
                           : runs.size() == 1 ? report_page(runs[0])
                                              : comparison_page(runs, &warnings);
  write_output(out, text, warnings);
}

// Whether a process trains in the folder: then it has the lock (run_lock.h).
static bool is_training(const std::string& folder) {
  const FileDescriptor file(open((folder + "/lock").c_str(), O_RDONLY | O_CLOEXEC));
  struct flock lock = {};
  lock.l_type = F_WRLCK, lock.l_whence = SEEK_SET;
  return file.fd >= 0 && fcntl(file.fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

// How many bytes the logs have in all.
static uintmax_t size_of_logs(const std::vector<std::string>& folders) {
  uintmax_t size = 0;
  std::error_code ignored;
  for (const std::string& folder : folders) size += std::filesystem::file_size(folder + "/log.jsonl", ignored);
  return size;
}

// Writes the page whenever a log has grown, until nobody trains. Reading a long log takes seconds: at most a tenth of
// the time is spent on it.
static void watch_runs(const ReportOptions& o, const std::string& out) {
  for (uintmax_t written = 0;;) {
    const bool is_last = std::none_of(o.folders.begin(), o.folders.end(), is_training);
    const double start = seconds_now();
    if (const uintmax_t size = size_of_logs(o.folders); is_last || size != written) written = size, report_runs(o, out);
    if (is_last) return;
    usleep(useconds_t(1e6 * std::clamp(9 * (seconds_now() - start), 1.0, 600.0)));
  }
}

// What `router` and `dense` have learned, of a run's newest checkpoint or of a model.
static void tell_learned_sources(const ReportOptions& o) {
  if (o.folders.size() != 1) user_error("--suggest-wiring and --sources are of one model; name its folder");
  const std::string model = model_folder(o.folders[0]);
  const ModelConfig config = read_config_json(model);
  const LearnedSources sources = read_learned_sources(model, config);
  if (sources.empty())
    user_error("%s: the wiring, \"%s\", has neither `router` nor `dense`: there is nothing that it has learned of "
               "sources",
               model, config.wiring.text);
  if (!o.sources.empty()) {
    std::vector<std::string> inputs = weight_files(model);
    inputs.push_back(model + "/config.json");
    check_replaces_no_input(o.sources, {}, inputs);
    write_file_durably(o.sources, learned_sources_csv(sources));
  }
  if (o.suggest_wiring) printf("%s", learned_sources_text(sources, config.wiring, config.num_heads).c_str());
}

static int run_report(int argc, char** argv) {
  ReportOptions o;
  CLI::App app("Shows training runs as a page of HTML, one file for a browser: a single run, or several side by side.\n"
               "Example: ./report runs/plain runs/sla -o compare.html");
  app.add_option("RUN", o.folders, "folders of runs (-o of the trainer); differences are to the first");
  app.add_option("--outline", o.outline,
                 "in place of RUN: a file that says what the page's sections are: lines `# TITLE`, `run FOLDER`, and "
                 "text");
  app.add_option("-o,--out", o.out, "the page; default, for a single run: RUN/report.html");
  app.add_flag("--watch", o.watch, "write the page again whenever a log has grown, until the runs have ended");
  app.add_flag("--tensorboard", o.tensorboard,
               std::string("in place of the page write TensorBoard's event file of a run; default: RUN/") +
                   event_file_name);
  app.add_flag("--suggest-wiring", o.suggest_wiring,
               "in place of the page print what `router` and `dense` have learned in the run's newest checkpoint, or "
               "in "
               "a model's folder, and the wirings without a router that come nearest");
  app.add_option("--sources", o.sources, "in place of the page write the weights of `router` and `dense`, as CSV");
  if (!parse_command_line(app, argc, argv)) return 0;
  if (o.folders.empty() == o.outline.empty())
    user_error("name the folders of runs, or an --outline; --help lists the options");
  if (o.watch + o.tensorboard + o.asks_for_sources() + !o.outline.empty() > 1)
    user_error("--watch, --tensorboard, --suggest-wiring or --sources, and --outline exclude each other; give one");
  if (!o.outline.empty()) return report_outline(o), 0;
  if (o.asks_for_sources()) return tell_learned_sources(o), 0;
  if (o.tensorboard && o.folders.size() > 1) user_error("--tensorboard: is of one run; name one folder");
  if (o.out.empty() && o.folders.size() > 1)
    user_error("%zu runs: name the page that compares them, with -o", o.folders.size());
  const std::string out =
      !o.out.empty() ? o.out : o.folders[0] + "/" + (o.tensorboard ? event_file_name : "report.html");
  if (o.watch) watch_runs(o, out);
  else report_runs(o, out);
  return 0;
}

int main(int argc, char** argv) {
  return run_program([&] { return run_report(argc, argv); });
}
