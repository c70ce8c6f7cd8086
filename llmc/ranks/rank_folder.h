// The folder of a run in which each rank has a file: `rank_3`, which that process alone writes, and has locked. By
// these files ranks without MPI meet, and tell how far they are, for the message if one of them hangs. Whatever else
// has the folder's name or a file's is refused and stays as it is; what a killed run has left misleads nobody.
#pragma once
#include <cstdint>
#include <string>
#include <vector>
#include "ranks.h"
#include "llmc/utils/files.h"

// What a rank's file says.
struct RankNote {
  std::string nonce, name;          // drawn by this process, and how messages call it
  std::string heard;                // the nonce of the rank 0 that has listed this rank's
  std::vector<std::string> listed;  // by rank 0: the nonces that it has found, from that of rank 1 on
  std::vector<uint8_t> secret;      // by rank 0, when all have heard
  int64_t times_written = 0, step = 0;
  uint64_t begun = 0;  // collectives
  bool is_paused = false;
};

struct RankFolder {
  // Makes the folder and this rank's file. Throws UserError if they cannot be made, are something else, another user's
  // or open to others, or if a process that lives is this rank.
  explicit RankFolder(const Ranks& ranks);
  // Removes the file, and the folder if it is empty then.
  ~RankFolder();

  // bytes (count) = rank 0's. A rank believes only a file that has its own nonce, and rank 0 tells its bytes to nobody
  // before all have read its. Throws UserError after so many seconds (0: never), on rank 0 with those that are missing.
  void share(void* bytes, size_t count, double seconds);

  // Writes this rank's note. Returns whether that has succeeded.
  bool write();
  // A rank's note; an empty one where it has none.
  RankNote read(int rank) const;
  std::vector<RankNote> read_all() const;

  RankNote own;

 private:
  Ranks ranks_;
  FileDescriptor file_;
  std::string path_of(int rank) const;
};
