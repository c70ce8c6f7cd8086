// The log of a run: OUT/log.jsonl, one JSON object a line, numbers in full precision.
#pragma once
#include <cstdint>
#include <set>
#include <string>
#include <variant>
#include <vector>
#include "llmc/base/files.h"

struct LogField;
using LogFields = std::vector<LogField>;
struct LogField {
  const char* key;
  std::variant<int64_t, double, bool, std::string, std::vector<double>, std::vector<std::string>, LogFields> value;
};

// {"key": value, ...}
std::string json_text(const LogFields& fields);

struct ResumedLog {
  int num_damaged = 0;                            // lines that were moved to log.damaged.jsonl
  std::set<int64_t> checkpoints;                  // steps whose checkpoint has a line
  bool is_validated = false, is_sampled = false;  // after the step that the run resumes from
};

// Until create() or resume() is called, lines are discarded. When write() returns, the line has been passed to the
// system; if the disk is full, it is kept in memory until there is room, and stderr says so once, as when the file has
// been deleted. Any other failure is a UserError.
struct RunLog {
  // Starts a new log in folder `out`; an existing one is renamed to log.1.jsonl, log.2.jsonl, ... Throws UserError if
  // it cannot.
  void create(const std::string& out);
  // Continues the log of a run that is resumed after `step` updates. Lines of later steps are dropped, or with
  // `keeps_later` moved to log.set_aside.jsonl, and an incomplete last line, as a killed process leaves it. Other lines
  // that are not valid are moved to log.damaged.jsonl. Throws UserError.
  ResumedLog resume(const std::string& out, int64_t step, bool keeps_later = false);

  void write(const LogFields& fields);  // {"key": value, ...}

  // Throws UserError if the disk still has no room for some lines, or the file has been deleted.
  void finish();

 private:
  std::string path_;
  FileDescriptor file_;
  std::string waiting_;      // lines that the disk had no room for
  bool disk_full_ = false;   // the disk is full, and a message on stderr has said so
  bool is_deleted_ = false;  // the file has been deleted, and a message on stderr has said so
  void open(int flags);
  void check_not_deleted();
};
