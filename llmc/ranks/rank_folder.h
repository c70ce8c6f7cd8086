// The folder of a run in which each rank has a file: `rank_3`, which that process alone writes, and has locked. By
// these files ranks without MPI meet, and tell how far they are, for the message if one of them hangs. Whatever else
// has the folder's name or a file's is refused and stays as it is; what a killed run has left misleads nobody.
#pragma once
#include <cstdint>
#include <string>
#include <vector>
#include "ranks.h"
#include "llmc/base/files.h"

// What a rank's file says.
struct RankNote {
  std::string nonce, name;          // drawn at random by each process; the rank as messages call it
  std::vector<std::string> listed;  // rank 0 alone: the nonces of ranks 1, 2, ... as it has found them
  std::string heard;                // the others: rank 0's nonce, once it has listed theirs
  std::vector<uint8_t> shared;      // rank 0 alone: the bytes, once all others have heard
  int64_t times_written = 0, step = 0;
  uint64_t begun = 0;       // collectives
  double idle_seconds = 0;  // since one began or was done, or the rank was paused
};

struct RankFolder {
  // Makes the folder and this rank's file. Throws UserError if they cannot be made, are something else, another user's
  // or open to others, or if a process that lives is this rank.
  explicit RankFolder(const Ranks& ranks);
  // Removes the file, rank 0 all of them, for ranks that are killed; and the folder if it is empty then.
  ~RankFolder();

  // bytes (count) = rank 0's. Rank 0 lists the nonces that it finds; a rank that is listed answers with rank 0's nonce;
  // rank 0 writes the bytes when all have answered. So a file that a killed run has left is never believed: its nonces
  // are nobody's. Throws UserError after so many seconds (0: never), on rank 0 with the ranks that are missing.
  void share(void* bytes, size_t count, double seconds);

  void write();  // this rank's note, from `own`; throws UserError
  // A rank's note; an empty one where it has none.
  RankNote read(int rank) const;
  std::vector<RankNote> read_all() const;

  RankNote own;

 private:
  Ranks ranks_;
  FileDescriptor file_;
  std::string path_of(int rank) const;
};
