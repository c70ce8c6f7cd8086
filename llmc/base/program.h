// What every program does before and after its work: its standard streams, its errors, its exit status.
#pragma once
#include <functional>
#include <string>

// What a program does when whoever read its standard output has gone (`| head -1`): a filter ends, as SIGPIPE
// ends it, because nobody wants the rest. What it does for its files continues.
enum class ReaderGone { ends, is_ignored };

// Runs `body` and returns main's exit status: what `body` returns, or 1 if it throws or, where that would be 0, its
// standard output could not be written. An exception, whichever library's, becomes "error: TEXT" on stderr; before that
// on_error(TEXT) is called. A standard stream that is closed is opened on /dev/null first: else a file that the program
// opens would get its descriptor, and what it prints. At the file size limit write() fails, as on a full disk.
int run_program(const std::function<int()>& body, ReaderGone reader_gone = ReaderGone::ends,
                const std::function<void(const std::string&)>& on_error = nullptr);

// Passes what has been printed to the system. Throws UserError if that or something before could not be written: for
// output that someone reads while the program runs.
void flush_output();
