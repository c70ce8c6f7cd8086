// report: pages of HTML from the folders of runs: one of a single run, a comparison of several; and other files and
// texts that are made of runs. The trainer needs none of it.
#include <CLI/CLI.hpp>
#include <fcntl.h>
#include <unistd.h>
#include <algorithm>
#include <cstdio>
#include <cstring>
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
  std::string out, outline;
  bool watch = false, tensorboard = false, suggest_wiring = false;
};

// The page, or TensorBoard's file.
static void report_runs(ReportOptions o) {
  std::vector<std::string> warnings, inputs;
  std::vector<ReportSection> sections;
  std::vector<RunHistory> runs;
  if (!o.outline.empty()) sections = read_outline(o.outline), inputs = {o.outline};
  for (const ReportSection& section : sections)
    o.folders.insert(o.folders.end(), section.folders.begin(), section.folders.end());
  for (const std::string& folder : o.folders) {
    if (o.outline.empty()) runs.push_back(read_run(folder));
    for (const std::string& file : files_of_run(folder)) inputs.push_back(file);
    for (const auto& [step, checkpoint] : checkpoints_in(folder))
      for (const std::string& file : files_of_model(checkpoint)) inputs.push_back(file);
  }
  check_output(o.out, inputs);  // that it can be written, and is none of these
  const std::string title = std::filesystem::path(o.out).stem().string();
  write_file_durably(o.out, !o.outline.empty() ? sections_page(title, sections, &warnings)
                            : o.tensorboard    ? event_file(runs[0])
                            : runs.size() == 1 ? report_page(runs[0])
                                               : comparison_page(runs, &warnings));
  for (const std::string& warning : warnings) print_warning(warning);
  printf("wrote %s\n", printable(o.out, /*one_line=*/true).c_str());
  fflush(stdout);
}

// Whether a process trains in the folder: then it has the lock (run_lock.h).
static bool is_training(const std::string& folder) {
  const FileDescriptor file(open((folder + "/lock").c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct flock lock = {};
  lock.l_type = F_WRLCK, lock.l_whence = SEEK_SET;
  return file.fd >= 0 && fcntl(file.fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

// Writes the page whenever a log has grown, until nobody trains. Reading a long log takes seconds: at most a tenth of
// the time is spent on it.
static void watch_runs(const ReportOptions& o) {
  for (uintmax_t written = 0;;) {
    const bool is_last = std::none_of(o.folders.begin(), o.folders.end(), is_training);
    const double start = seconds_now();
    uintmax_t size = 0;  // of all logs
    std::error_code ignored;
    for (const std::string& folder : o.folders) size += std::filesystem::file_size(folder + "/log.jsonl", ignored);
    if (is_last || size != written) written = size, report_runs(o);
    if (is_last) return;
    usleep(useconds_t(1e6 * std::clamp(9 * (seconds_now() - start), 1.0, 600.0)));
  }
}

// The wirings that come nearest to what a model with `router` has learned, the best last.
static void suggest_wiring(const std::string& folder) {
  const std::string model = model_folder(folder);
  const ModelConfig config = read_config_json(model);
  const auto nearest = nearest_wirings(read_learned_sources(model, config), config.wiring, config.num_heads);
  if (nearest.empty())
    user_error("%s: the wiring, \"%s\", has no `router`: there is nothing that it has learned of sources", model,
               config.wiring.text);
  printf("%s  wiring\n", near_share_name);
  for (const NearWiring& near : nearest)
    printf("%*.3f  %s\n", int(strlen(near_share_name)), near.share, near.text.c_str());
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
               "in place of the page print the wirings without a router that come nearest to what `router` has learned "
               "in the run's newest checkpoint, or in a model's folder");
  if (!parse_command_line(app, argc, argv)) return 0;
  if (o.folders.empty() == o.outline.empty())
    user_error("name the folders of runs, or an --outline; --help lists the options");
  if (o.watch + o.tensorboard + o.suggest_wiring + !o.outline.empty() > 1)
    user_error("--watch, --tensorboard, --suggest-wiring and --outline exclude each other; give one");
  if (o.tensorboard + o.suggest_wiring > 0 && o.folders.size() > 1)
    user_error("--tensorboard and --suggest-wiring are of one run; name one folder");
  if (o.suggest_wiring && !o.out.empty()) user_error("--suggest-wiring: prints, and writes no file; leave out -o");
  if (o.suggest_wiring) return suggest_wiring(o.folders[0]), 0;
  if (o.out.empty() && !o.outline.empty()) user_error("--outline: name the page, with -o");
  if (o.out.empty() && o.folders.size() > 1)
    user_error("%zu runs: name the page that compares them, with -o", o.folders.size());
  if (o.out.empty()) o.out = o.folders[0] + "/" + (o.tensorboard ? event_file_name : "report.html");
  if (o.watch) watch_runs(o);
  else report_runs(o);
  return 0;
}

int main(int argc, char** argv) {
  return run_program([&] { return run_report(argc, argv); });
}
