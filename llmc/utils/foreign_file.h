// What a file is that was given for another kind: by its first bytes, and, where it has no mark, by what its bytes look
// like.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

constexpr size_t foreign_head_bytes = 512;  // of a file, by which foreign_format knows it

// What a clone has in place of a large file that was not fetched.
constexpr const char* lfs_pointer = "version https://git-lfs.github.com/spec/";
constexpr const char* lfs_advice = "is a Git LFS pointer, not the file itself; fetch that with `git lfs pull`";

// What a file that begins with `head` is and what to do with it: "is a zip archive; unpack it". "" for text, and for
// whatever else is not known.
std::string foreign_format(std::string_view head);

// The same for a file that should be text in UTF-8 or other bytes: also "is UTF-16LE text; convert it ...", with a byte
// order mark or without.
std::string why_no_text(std::string_view begin);

// Whether more than a hundredth of the first kilobyte, or of four that follow, are control characters that no text has:
// others than those that file(1) takes for text's (7 to 13 and escape). UTF-8 and other encodings of text pass.
bool is_binary(std::string_view bytes);

// Words of a file that has no mark, from all over it: pieces of whole groups of four, which begin at a multiple of four
// words in the file. Returns why they are no token ids of a vocabulary of `vocab_size`, as foreign_format does; "" if
// they may be, as 31 words or fewer always may. The 16-bit units of ASCII text are the ids of its bytes: they are taken
// for text where the vocabulary is much larger than that of bytes.
std::string why_no_tokens(const std::vector<uint16_t>& words, int vocab_size);
