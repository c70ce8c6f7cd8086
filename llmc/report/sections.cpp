#include <algorithm>
#include <cinttypes>
#include <functional>
#include <map>
#include "llmc/base/error.h"
#include "llmc/base/files.h"
#include "llmc/base/text.h"
#include "parts.h"
#include "report.h"
#include "statistics.h"

std::vector<ReportSection> read_outline(const std::string& path) {
  std::vector<ReportSection> sections;
  int number = 0;
  for (const std::string& line : lines_of(read_whole_file(path))) {
    number++;
    if (is_blank(line)) continue;
    if (begins_with(line, "# ")) {
      sections.push_back({line.substr(2), {}, {}});
      continue;
    }
    if (sections.empty()) user_error("%s:%d: a title, `# TITLE`, must come first", path, number);
    ReportSection& section = sections.back();
    if (begins_with(line, "run ")) {
      section.folders.push_back(line.substr(4));
    } else if (begins_with(line, "published ")) {
      if (section.folders.empty())
        user_error("%s:%d: `published` says something of the run before it, and there is none in this section", path,
                   number);
      section.published[section.folders.back()] = line.substr(10);
    } else if (begins_with(line, "level ")) {
      int end = 0;
      if (sscanf(line.c_str(), "level %" SCNd64 " of %n", &section.level, &end) != 1 || end == 0)
        user_error("%s:%d: `%s`: it is `level NUMBER of TASK`", path, number, line);
      section.task = line.substr(size_t(end));
    } else if (begins_with(line, "chance ")) {
      char rest;
      if (sscanf(line.c_str(), "chance %lf%c", &section.chance, &rest) != 1 || !(section.chance >= 0) ||
          section.chance > 1)
        user_error("%s:%d: `%s`: it is `chance SHARE`, a number from 0 to 1", path, number, line);
    } else {
      section.paragraphs.push_back(line.substr(line.find_first_not_of(' ')));
    }
  }
  return sections;
}

// ----------------------------------------------------------------------------
// Accuracies, a wiring a row and a section a column

using namespace report;

namespace {

struct Column : ReportSection {
  std::vector<Arm> arms;

  // Null if the wiring has no run.
  const Arm* arm(const std::string& wiring) const {
    const auto found = std::find_if(arms.begin(), arms.end(), [&](const Arm& k) { return k.label == wiring; });
    return found == arms.end() ? nullptr : &*found;
  }
};

double flops_at(const Arm& arm, const ValPoint& point) { return arm.flops_per_token * point.tokens; }

// The least FLOPs that a finished run of the column's took; NaN if there is none.
double least_flops(const Column& column) {
  double least = NAN;
  for (const Arm& arm : column.arms)
    for (const auto& [seed, points] : arm.validations)
      if (!points.empty()) least = std::fmin(least, flops_at(arm, points.back()));
  return least;
}

// The accuracy of the last validation that took no more than `flops`, of each seed.
std::vector<double> accuracies_at(const Arm& arm, double flops) {
  std::vector<double> found;
  for (const auto& [seed, points] : arm.validations) {
    double accuracy = NAN;
    for (const ValPoint& point : points)
      if (flops_at(arm, point) <= flops) accuracy = point.accuracy;
    if (std::isfinite(accuracy)) found.push_back(accuracy);
  }
  return found;
}

std::string share_cell(const std::vector<double>& accuracies) {
  if (accuracies.empty()) return "<td>-</td>";
  const Estimate e = estimate(accuracies);
  return format("<td style=\"--share:%.3f\">%.1f", e.mean, 100 * e.mean) +
         (std::isfinite(e.interval) ? format(" &#177; %.1f", 100 * e.interval) : "") + "</td>";
}

constexpr double solved = 0.99;

// The median over seeds of the step of the first validation above 0.99, where half of them have one; how many have one
// if not all. A run without one was watched to its last validation.
std::string solved_cell(const Arm& arm) {
  std::vector<Watched> runs;
  size_t count = 0;
  int64_t last = 0;
  for (const auto& [seed, points] : arm.validations) {
    if (points.empty()) continue;
    const auto first =
        std::find_if(points.begin(), points.end(), [](const ValPoint& point) { return point.accuracy > solved; });
    const ValPoint& point = first == points.end() ? points.back() : *first;
    runs.push_back({double(point.step), first != points.end()});
    count += first != points.end(), last = std::max(last, points.back().step);
  }
  if (runs.empty()) return "<td>-</td>";
  const double half = kaplan_meier_median(runs);
  return "<td>" + (std::isfinite(half) ? format("%.0f", half) : format("&gt; %" PRId64, last)) +
         (count < runs.size() ? format(" (%zu of %zu)", count, runs.size()) : "") + "</td>";
}

// The hardest level of `task` that all seeds solve, and the hardest of all if some seeds only solve it.
std::string hardest_cell(const std::vector<Column>& columns, const std::string& task, const std::string& wiring) {
  int64_t by_all = -1, by_some = -1;
  std::string seeds;  // that solve `by_some`
  for (const Column& column : columns) {
    const Arm* arm = column.task == task ? column.arm(wiring) : nullptr;
    if (arm == nullptr) continue;
    const std::vector<double> accuracies = accuracies_at(*arm, INFINITY);
    const auto count = size_t(std::count_if(accuracies.begin(), accuracies.end(), [](double a) { return a > solved; }));
    if (count == 0) continue;
    if (count == accuracies.size()) by_all = std::max(by_all, column.level);
    if (column.level > by_some) {
      by_some = column.level;
      seeds = format("%zu of %zu", count, accuracies.size());
    }
  }
  if (by_some < 0) return "<td>none</td>";
  const std::string partly = format("%" PRId64 " (%s)", by_some, seeds.c_str());
  if (by_all < 0) return "<td>" + partly + "</td>";
  return "<td>" + format("%" PRId64, by_all) + (by_some > by_all ? ", " + partly : "") + "</td>";
}

// All wirings of the columns, each once.
std::vector<std::string> wirings_of(const std::vector<Column>& columns) {
  std::vector<std::string> wirings;
  for (const Column& column : columns)
    for (const Arm& arm : column.arms)
      if (std::find(wirings.begin(), wirings.end(), arm.label) == wirings.end()) wirings.push_back(arm.label);
  return wirings;
}

// A table of wirings x `titles`, with `last_row` below them.
std::string map_of(const std::vector<std::string>& wirings, const std::vector<std::string>& titles,
                   const std::function<std::string(size_t column, const std::string& wiring)>& cell,
                   const std::string& last_row = "") {
  std::vector<std::string> head = {"wiring"};
  for (const std::string& title : titles) head.push_back(html(title));
  std::string rows = row(head, "th");
  for (const std::string& wiring : wirings) {
    rows += "<tr><td>" + html(wiring) + "</td>";
    for (size_t column = 0; column < titles.size(); column++) rows += cell(column, wiring);
    rows += "</tr>\n";
  }
  return "<div class=\"wide\"><table class=\"heat\">\n" + rows + last_row + "</table></div>\n";
}

std::string map_of(const std::vector<Column>& columns,
                   const std::function<std::string(const Column&, const Arm&)>& cell,
                   const std::string& last_row = "") {
  std::vector<std::string> titles;
  for (const Column& column : columns) titles.push_back(column.title);
  const auto cell_of = [&](size_t column, const std::string& wiring) {
    const Arm* arm = columns[column].arm(wiring);
    return arm == nullptr ? "<td>-</td>" : cell(columns[column], *arm);
  };
  return map_of(wirings_of(columns), titles, cell_of, last_row);
}

// The row of what a guess gets right in each column; empty if no column says it.
std::string chance_row(const std::vector<Column>& columns) {
  std::string cells;
  bool is_known = false;
  for (const Column& column : columns) {
    is_known |= std::isfinite(column.chance);
    cells += std::isfinite(column.chance) ? share_cell({column.chance}) : "<td>-</td>";
  }
  return is_known ? "<tr><td>chance</td>" + cells + "</tr>\n" : "";
}

// Empty if no section is a level of a task.
std::string hardest_map(const std::vector<Column>& columns) {
  std::vector<std::string> tasks, titles;
  for (const Column& column : columns) {
    if (column.task.empty()) continue;
    const auto found = std::find(tasks.begin(), tasks.end(), column.task);
    const std::string level = format(" %" PRId64, column.level);
    if (found == tasks.end()) {
      tasks.push_back(column.task), titles.push_back(column.task + level);
    } else {
      titles[size_t(found - tasks.begin())] += "," + level;
    }
  }
  if (tasks.empty()) return "";
  return "<h2>Hardest level solved</h2>\n<p>Of the levels that a column's title names, the hardest with an accuracy "
         "above 99 % after the last update, with all seeds; in parentheses how many of the seeds, if not all.</p>\n" +
         map_of(wirings_of(columns), titles,
                [&](size_t column, const std::string& wiring) { return hardest_cell(columns, tasks[column], wiring); });
}

std::string accuracy_maps(const std::vector<Column>& columns) {
  const auto has_accuracy = [](const Column& column) {
    return std::any_of(column.arms.begin(), column.arms.end(),
                       [](const Arm& arm) { return !accuracies_at(arm, INFINITY).empty(); });
  };
  if (std::none_of(columns.begin(), columns.end(), has_accuracy)) return "";
  const std::string chance = chance_row(columns);
  return "<h2>Accuracy after the last update</h2>\n<p>Percent of the scored tokens of validation; means over seeds "
         "with 95 % intervals. Only runs that are finished count.</p>\n" +
         map_of(
             columns, [](const Column&, const Arm& arm) { return share_cell(accuracies_at(arm, INFINITY)); }, chance) +
         "<h2>Accuracy at equal FLOPs</h2>\n<p>Of each run's last validation that took no more FLOPs than the "
         "column's cheapest run takes in all.</p>\n" +
         map_of(
             columns,
             [](const Column& column, const Arm& arm) { return share_cell(accuracies_at(arm, least_flops(column))); },
             chance) +
         "<h2>Updates until solved</h2>\n<p>The step after which half of the seeds have had a validation with an "
         "accuracy above 99 %, by Kaplan and Meier's estimate; in parentheses how many of the seeds have had one, if "
         "not all.</p>\n" +
         map_of(columns, [](const Column&, const Arm& arm) { return solved_cell(arm); }) + hardest_map(columns);
}

}  // namespace

std::string sections_page(const std::string& title, const std::vector<ReportSection>& sections,
                          std::vector<std::string>* warnings) {
  std::string body;
  std::vector<Column> columns;
  json charts = json::array();
  std::map<std::string, RunHistory> all;  // by folder: sections share runs
  size_t runs_of_page = 0;
  for (const ReportSection& s : sections) runs_of_page += s.folders.size();
  for (size_t i = 0; i < sections.size(); i++) {
    std::vector<RunHistory> runs;
    std::vector<std::string> folders;  // of `runs`
    std::vector<std::string> lines;    // warnings
    for (const std::string& folder : sections[i].folders) {
      if (!path_exists(folder + "/log.jsonl")) {
        lines.push_back(folder + " has not begun, and is left out.");
        continue;
      }
      if (all.count(folder) == 0) all[folder] = read_run(folder);
      runs.push_back(all[folder]), folders.push_back(folder);
    }
    body += "<h2>" + html(sections[i].title) + "</h2>\n";
    for (const std::string& paragraph : sections[i].paragraphs) body += "<p>" + html(paragraph) + "</p>\n";
    if (runs.empty()) {
      body += sections[i].folders.empty() ? "" : "<p class=\"warn\">None of these runs has begun.</p>\n";
      continue;
    }
    const Comparison compared(runs);
    columns.push_back({sections[i], compared.arms});
    for (std::string& line : comparison_warnings(compared)) lines.push_back(std::move(line));
    for (size_t line = 0; warnings != nullptr && line < lines.size(); line++)
      warnings->push_back(sections[i].title + ": " + lines[line]);
    body += warning_lines(lines);
    for (const RunHistory& run : runs) body += notices(run);
    std::map<int, std::string> published;  // by arm
    for (size_t run = 0; run < runs.size(); run++) {
      const auto found = sections[i].published.find(folders[run]);
      if (found != sections[i].published.end()) published[compared.arm_of_run[run]] = found->second;
    }
    const std::string over = over_seeds(compared.arms, published);
    body +=
        (over.empty() ? final_losses(compared) : over) + format("<div class=\"charts\" id=\"charts-%zu\"></div>\n", i);
    for (json& chart : comparison_charts(compared, runs_of_page)) {
      chart["place"] = format("charts-%zu", i);
      charts.push_back(std::move(chart));
    }
  }
  return page(title, "<h1>" + html(title) + "</h1>\n" + accuracy_maps(columns) + axes + body, charts);
}
