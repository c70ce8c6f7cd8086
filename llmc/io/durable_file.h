// Files and folders that are either wholly there or not at all.
#pragma once
#include <string>  // std::string

// Writes, fsyncs and closes. Throws UserError with the path and the system's reason.
void write_file_durably(const std::string& path, const std::string& text);

// Makes what was created, renamed or removed in a folder survive a crash.
void sync_folder(const std::string& path);

// The folder that a path lies in: "a" of "a/b", and "." of "b".
std::string parent_folder(const std::string& path);

// mkdir -p. Throws UserError.
void make_folders(const std::string& path);

// Gives `temporary` the name `path` in one step that is on disk when the call returns. A file replaces a file of that name; a
// folder's name must be free.
void rename_durably(const std::string& temporary, const std::string& path);
