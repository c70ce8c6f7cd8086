#include "logger.h"
#include <cerrno>               // errno
#include <cstring>              // strerror
#include <filesystem>           // exists, rename
#include <fstream>              // std::ifstream
#include <nlohmann/json.hpp>    // nlohmann::ordered_json
#include "durable_file.h"       // write_file_durably, rename_durably
#include "error.h"              // user_error, format

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;

RunLog::~RunLog() {
  if (file_ != nullptr) fclose(file_);
}

void RunLog::open(const char* mode) {
  file_ = fopen(path_.c_str(), mode);
  if (file_ == nullptr) user_error("%s: cannot be written: %s", path_.c_str(), strerror(errno));
}

void RunLog::create(const std::string& out) {
  path_ = out + "/log.jsonl";
  if (fs::exists(path_)) {
    int n = 1;
    while (fs::exists(out + format("/log.%d.jsonl", n))) n++;
    rename_durably(path_, out + format("/log.%d.jsonl", n));
  }
  open("w");
}

void RunLog::resume(const std::string& out, int64_t step) {
  path_ = out + "/log.jsonl";
  std::string kept, line;
  std::ifstream old(path_);
  while (std::getline(old, line)) {
    json j = json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!j.is_object()) break;  // a line that was cut short when the run was killed
    if (j.value("step", int64_t(0)) <= step) kept += line + "\n";
  }
  write_file_durably(path_ + ".tmp", kept);
  rename_durably(path_ + ".tmp", path_);
  open("a");
}

static json to_json(const LogFields& fields) {
  json j = json::object();
  for (const LogField& field : fields) std::visit([&](const auto& value) { j[field.key] = value; }, field.value);
  return j;
}

// Bytes of a text that are not UTF-8 become U+FFFD rather than an exception.
static std::string dump(const json& j) { return j.dump(-1, ' ', false, json::error_handler_t::replace); }

void RunLog::write(const LogFields& fields) { write_line(dump(to_json(fields))); }
void RunLog::write(const char* key, const LogFields& fields) { write_line(dump(json{{key, to_json(fields)}})); }

void RunLog::write_line(const std::string& line) {
  if (file_ == nullptr) return;
  if (fprintf(file_, "%s\n", line.c_str()) < 0 || fflush(file_) != 0)
    user_error("%s: cannot be written: %s", path_.c_str(), strerror(errno));
}
