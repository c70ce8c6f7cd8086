// The run's record: OUT/log.jsonl, one JSON object a line, numbers with all their digits.
#pragma once
#include <cstdint>  // int64_t
#include <string>   // std::string
#include <variant>  // std::variant
#include <vector>   // std::vector

struct LogField {
  const char* key;
  std::variant<int64_t, double, bool, std::string> value;
};
using LogFields = std::vector<LogField>;

// Without a folder it swallows everything. A line is on its way to the disk when write() returns, or, if the disk is full, waits in
// memory for room, which stderr says once. Any other failure is a UserError.
struct RunLog {
  RunLog() = default;
  ~RunLog();
  RunLog(const RunLog&) = delete;
  RunLog& operator=(const RunLog&) = delete;

  // A new log in folder `out`; an older one there is kept as log.1.jsonl, log.2.jsonl, ...
  void create(const std::string& out);
  // Goes on with the log of a run that is resumed after `step` updates: what it had logged of later ones is dropped.
  void resume(const std::string& out, int64_t step);

  void write(const LogFields& fields);                    // {"key": value, ...}
  void write(const char* key, const LogFields& fields);   // {key: {"key": value, ...}}

  // Throws UserError if there are lines for which the disk still has no room.
  void finish();

 private:
  std::string path_;
  int fd_ = -1;
  std::string waiting_;      // what the disk had no room for
  bool disk_full_ = false;   // and that has been said
  void open(int flags);
  void write_line(const std::string& line);
};
