// What a file is that was given for another kind, by its first bytes, and whether it is text.
#pragma once
#include <string>
#include <string_view>

constexpr size_t foreign_head_bytes = 512;  // of a file, by which foreign_format knows it

// What a clone has in place of a large file that was not fetched.
constexpr const char* lfs_pointer = "version https://git-lfs.github.com/spec/";
constexpr const char* lfs_advice = "is a Git LFS pointer, not the file itself; fetch that with `git lfs pull`";

// What a file that begins with `head` is and what to do with it: "is a zip archive; unpack it", or, by its byte order
// mark, "is UTF-16LE text; convert it ...". "" for text in UTF-8 or other bytes, and for whatever else is not known.
std::string foreign_format(std::string_view head);

// Whether more than a hundredth of the first kilobyte, or of four that follow, are control characters that no text has:
// others than those that file(1) takes for text's (7 to 13 and escape). UTF-8 and other encodings of text pass.
bool is_binary(std::string_view bytes);
