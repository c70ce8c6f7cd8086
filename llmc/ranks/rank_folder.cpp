#include "rank_folder.h"
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include "llmc/base/clock.h"
#include "llmc/base/crc32c.h"
#include "llmc/base/error.h"
#include "llmc/base/message.h"

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankNote, nonce, name, heard, listed, shared, times_written, step, begun,
                                   idle_seconds)

static const char advice[] = "name another place with --rendezvous FOLDER";

std::string RankFolder::path_of(int rank) const { return ranks_.folder + format("/rank_%d", rank); }

RankFolder::RankFolder(const Ranks& ranks) : ranks_(ranks) {
  const std::string &folder = ranks.folder, path = path_of(ranks.rank);
  struct stat status = {};
  if (!path_exists(parent_folder(folder))) make_folders(parent_folder(folder));
  if ((mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) || lstat(folder.c_str(), &status) != 0)
    user_error("%s: cannot be made, for the ranks to meet in: %s; %s", folder, strerror(errno), advice);
  if (!S_ISDIR(status.st_mode) || status.st_uid != geteuid() || (status.st_mode & 077) != 0)
    user_error("%s: is no folder of this user alone, for the ranks to meet in; remove it, or %s", folder, advice);
  do {  // until it is none that its last process has just removed
    file_ = FileDescriptor(open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600));
    if (file_.fd < 0 || fstat(file_.fd, &status) != 0)
      user_error("%s: cannot be written: %s; %s", path, strerror(errno), advice);
    if (!S_ISREG(status.st_mode)) user_error("%s: is no file; remove it, or %s", path, advice);
    if (lock_file(file_.fd) == FileLock::held_by_another)
      user_error("%s: another process that lives is rank %d of this run; %s", path, ranks.rank, advice);
    fstat(file_.fd, &status);
  } while (status.st_nlink == 0);
  std::random_device device;
  own.name = rank_name(ranks);
  own.nonce = format("%08x%08x%08x%08x", device(), device(), device(), device());
  write();
}

RankFolder::~RankFolder() {
  for (int rank = 0; rank < ranks_.size; rank++)
    if (ranks_.rank == 0 || rank == ranks_.rank) unlink(path_of(rank).c_str());
  rmdir(ranks_.folder.c_str());
}

void RankFolder::write() {
  own.times_written++;
  std::string text = nlohmann::json(own).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  text = crc32c_hex(crc32c(text.data(), text.size())) + text;
  // fdatasync: for ranks on other machines, which read the file too.
  if (write_all(file_.fd, text.data(), text.size(), 0) != text.size() || ftruncate(file_.fd, off_t(text.size())) != 0 ||
      fdatasync(file_.fd) != 0)
    user_error("%s: cannot be written: %s; %s", path_of(ranks_.rank), strerror(errno), advice);
}

RankNote RankFolder::read(int rank) const {
  const std::string text = try_read_file(path_of(rank)).value_or("");
  // It may be half of an older note and half of a newer one.
  if (text.size() < 8 || text.substr(0, 8) != crc32c_hex(crc32c(text.data() + 8, text.size() - 8))) return {};
  try {
    return nlohmann::json::parse(text.substr(8)).get<RankNote>();
  } catch (const nlohmann::json::exception&) { return {}; }  // of another version of this program
}

std::vector<RankNote> RankFolder::read_all() const {
  std::vector<RankNote> notes;
  for (int rank = 0; rank < ranks_.size; rank++) notes.push_back(read(rank));
  return notes;
}

void RankFolder::share(void* bytes, size_t count, double seconds) {
  bool is_told = false;
  for (const double start = seconds_now();; usleep(30000)) {
    std::string missing;
    if (ranks_.rank > 0) {
      const RankNote first = read(0);
      const size_t place = size_t(ranks_.rank) - 1;
      const bool is_listed = place < first.listed.size() && first.listed[place] == own.nonce;
      if (is_listed && first.shared.size() == count) {
        memcpy(bytes, first.shared.data(), count);
        return;
      }
      if (is_listed && std::exchange(own.heard, first.nonce) != first.nonce) write();
    } else {
      std::vector<std::string> found;
      for (int rank = 1; rank < ranks_.size; rank++) {
        const RankNote note = read(rank);
        found.push_back(note.nonce);
        if (note.heard != own.nonce) missing += format("%s%d", missing.empty() ? "" : ", ", rank);
      }
      if (missing.empty()) own.shared.assign(static_cast<uint8_t*>(bytes), static_cast<uint8_t*>(bytes) + count);
      if (std::exchange(own.listed, found) != found || missing.empty()) write();
      if (missing.empty()) return;
    }
    const double waited = seconds_now() - start;
    if (ranks_.rank == 0 && waited > 10 && !std::exchange(is_told, true))
      print_message("waiting",
                    format("for ranks %s of %d, in %s", missing.c_str(), ranks_.size, ranks_.folder.c_str()));
    if (seconds > 0 && waited > seconds)
      user_error("%s of %d have not come to %s in %.0f s (--hang-timeout); the ranks' own messages say why",
                 ranks_.rank > 0 ? "some" : "ranks " + missing, ranks_.size, ranks_.folder, waited);
  }
}
