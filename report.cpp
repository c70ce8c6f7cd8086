// report: pages of HTML from the folders of runs. Of one run, what the trainer writes as OUT/report.html; of several, a
// comparison.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>
#include "llmc/run/report.h"
#include "llmc/utils/command_line.h"
#include "llmc/utils/error.h"
#include "llmc/utils/files.h"
#include "llmc/utils/message.h"
#include "llmc/utils/program.h"
#include "llmc/utils/utf8.h"

// Throws UserError unless the page can be written, and replaces nothing that it is made of.
static void check_page(const std::string& page, const std::vector<std::string>& folders,
                       std::vector<std::string> inputs) {
  for (const std::string& folder : folders)
    for (const std::string& file : files_of_run(folder)) inputs.push_back(file);
  check_output(page, inputs);
}

static void write_page(const std::string& path, const std::string& page, const std::vector<std::string>& warnings) {
  write_file_durably(path, page);
  for (const std::string& warning : warnings) print_warning(warning);
  printf("wrote %s\n", printable(path, /*one_line=*/true).c_str());
}

static int run_report(int argc, char** argv) {
  std::vector<std::string> folders;
  std::vector<std::string> warnings;
  std::string out, outline;
  CLI::App app("Shows training runs as a page of HTML, one file for a browser: a single run, or several side by side.\n"
               "Example: ./report runs/plain runs/sla -o compare.html");
  app.add_option("RUN", folders, "folders of runs (-o of the trainer); differences are to the first");
  app.add_option("--outline", outline,
                 "in place of RUN: a file that says what the page's sections are: lines `# TITLE`, `run FOLDER`, and "
                 "text");
  app.add_option("-o,--out", out, "the page; default, for a single run: RUN/report.html");
  if (!parse_command_line(app, argc, argv)) return 0;
  if (folders.empty() == outline.empty())
    user_error("name the folders of runs, or an --outline; --help lists the options");
  if (out.empty() && !outline.empty()) user_error("--outline: name the page, with -o");
  if (!outline.empty()) {
    const std::vector<ReportSection> sections = read_outline(outline);
    for (const ReportSection& section : sections)
      folders.insert(folders.end(), section.folders.begin(), section.folders.end());
    check_page(out, folders, {outline});
    const std::string page = sections_page(std::filesystem::path(out).stem().string(), sections, &warnings);
    write_page(out, page, warnings);
    return 0;
  }
  if (out.empty() && folders.size() > 1)
    user_error("%zu runs: name the page that compares them, with -o", folders.size());
  if (out.empty()) out = folders[0] + "/report.html";
  std::vector<RunHistory> runs;
  for (const std::string& folder : folders) runs.push_back(read_run(folder));
  check_page(out, folders, {});
  const std::string page = runs.size() == 1 ? report_page(runs[0]) : comparison_page(runs, &warnings);
  write_page(out, page, warnings);
  return 0;
}

int main(int argc, char** argv) {
  return run_program([&] { return run_report(argc, argv); });
}
