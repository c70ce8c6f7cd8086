#include "logger.h"
#include <fcntl.h>
#include <sys/stat.h>
#include <cerrno>
#include <cstring>
#include <type_traits>
#include <utility>
#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/base/message.h"

using json = nlohmann::ordered_json;

void RunLog::open(int flags) {
  file_ = FileDescriptor(::open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | flags, 0666));
  if (file_.fd < 0) user_error("%s: cannot be written: %s", path_, strerror(errno));
}

void RunLog::create(const std::string& out) {
  path_ = out + "/log.jsonl";
  set_aside(path_);
  open(O_TRUNC);
}

// The step of a line; -1 if it is no JSON object, or its step no number.
static int64_t step_of_line(const json& j) {
  if (!j.is_object()) return -1;
  const auto step = j.find("step");
  if (step == j.end()) return 0;  // the first line, which describes the run
  return step->is_number_integer() && *step >= 0 ? step->get<int64_t>() : -1;
}

// What a log has; "" if there is none.
static std::string text_of_log(const std::string& path) {
  return path_exists(path) ? read_whole_file(path, most_text_bytes) : "";
}

ResumedLog RunLog::resume(const std::string& out, int64_t step, bool keeps_later) {
  path_ = out + "/log.jsonl";
  const std::string old = text_of_log(path_), damaged_path = out + "/log.damaged.jsonl",
                    later_path = out + "/log.set_aside.jsonl";
  std::string kept, damaged = text_of_log(damaged_path), later;
  ResumedLog found;
  for (size_t begin = 0, end; (end = old.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const std::string line = old.substr(begin, end - begin);
    const json j = json::parse(line, nullptr, /*allow_exceptions=*/false);
    const int64_t its_step = step_of_line(j);
    if (its_step < 0) damaged += line + "\n", found.num_damaged++;
    if (its_step > step) later += line + "\n";
    if (its_step < 0 || its_step > step) continue;
    kept += line + "\n";
    if (j.contains("checkpoint")) found.checkpoints.insert(its_step);
    found.is_validated |= its_step == step && j.contains("val_loss");
    found.is_sampled |= its_step == step && j.contains("sample");
  }
  if (found.num_damaged > 0) write_file_durably(damaged_path, damaged);
  if (keeps_later && !later.empty()) write_file_durably(later_path, text_of_log(later_path) + later);
  write_file_durably(path_, kept);
  open(O_APPEND);
  return found;
}

static json to_json(const LogFields& fields) {
  json j = json::object();
  for (const LogField& field : fields)
    std::visit(
        [&](const auto& value) {
          if constexpr (std::is_same_v<decltype(value), const LogFields&>) j[field.key] = to_json(value);
          else j[field.key] = value;
        },
        field.value);
  return j;
}

std::string json_text(const LogFields& fields) { return dump_json(to_json(fields)); }

// Notices, and says once, that nobody will ever read what is written.
void RunLog::check_not_deleted() {
  struct stat status;
  if (is_deleted_ || fstat(file_.fd, &status) != 0 || status.st_nlink > 0) return;
  is_deleted_ = true;
  print_error(path_ + ": has been deleted while the run writes it; the run continues, and its log is lost");
}

void RunLog::write(const LogFields& fields) {
  if (file_.fd < 0) return;
  check_not_deleted();
  waiting_ += json_text(fields) + "\n";
  waiting_.erase(0, write_all(file_.fd, waiting_.data(), waiting_.size()));
  const bool was_full = std::exchange(disk_full_, !waiting_.empty());
  if (!disk_full_) return;
  if (errno != ENOSPC && errno != EDQUOT && errno != EFBIG)
    user_error("%s: cannot be written: %s", path_, strerror(errno));
  if (!was_full)
    print_error(format("%s: cannot be written: %s; its lines wait for room", path_.c_str(), strerror(errno)));
}

void RunLog::finish() {
  if (file_.fd >= 0) check_not_deleted();
  if (is_deleted_) user_error("%s: was deleted while the run wrote it: the run has no log", path_);
  if (!waiting_.empty()) user_error("%s: its last lines could not be written: the disk is full", path_);
}
