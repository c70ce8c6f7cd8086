// Pages of HTML that show runs, each in one file that needs no server and no network: OUT/report.html of one run, and
// several side by side. Charts are drawn by Chart.js, which the build puts into the program with its licence; without
// it the pages have numbers only.
#pragma once
#include <cmath>
#include <map>
#include <string>
#include <vector>
#include "llmc/train/run_history.h"

// The page of a run: losses, learning rate, gradient norm and speed over steps, tokens, time and FLOPs; losses by
// position, if they have been measured; memory, wiring, samples, options and the machine; and what is wrong with its
// log, if anything is.
std::string report_page(const RunHistory& run);

// Runs side by side: what they share, their losses, K/V bytes per token against loss, losses by position; and where
// runs differ by their seed alone, means with 95 % confidence intervals and, by seeds, differences to the runs of the
// first one's arm with a paired t-test. `warnings` gets what the page says of losses that cannot be compared.
std::string comparison_page(const std::vector<RunHistory>& runs, std::vector<std::string>* warnings = nullptr);

// A part of a page: a heading, paragraphs, and runs to compare.
struct ReportSection {
  std::string title;
  std::vector<std::string> paragraphs;
  std::vector<std::string> folders;
  std::map<std::string, std::string> published = {};  // of some folders: the difference that a publication found
  std::string task = {};                              // what the runs learn, if there are levels of it
  int64_t level = 0;                                  // of `task`: more is harder
  double chance = NAN;                                // the share of right answers of a guess; NaN: not known
};

// An outline of a page: lines `# TITLE` begin its sections, lines `run FOLDER` name their runs, a line `published TEXT`
// says what difference a publication found for the run before it, a line `level NUMBER of TASK` how hard a form of a
// task a section is about, a line `chance SHARE` what share of its answers a guess gets right, and other lines, and all
// that begin with a space, are paragraphs. Throws UserError, with the line, for anything before the first title, for
// `published` before a run, and for what is no number.
std::vector<ReportSection> read_outline(const std::string& path);

// Sections below each other, with the runs over seeds and their validation losses in each. Runs that have not begun are
// named. Before them, if validations have accuracies: of each wiring (rows) and section (columns) the mean
// accuracy over seeds after the last update and at equal FLOPs beside that of a guess, after how many updates it was
// above 0.99, and of tasks with levels the hardest on which it was. `warnings` as above, each with its section.
std::string sections_page(const std::string& title, const std::vector<ReportSection>& sections,
                          std::vector<std::string>* warnings = nullptr);
