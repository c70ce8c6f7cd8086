// Options of programs, by CLI11.
#pragma once
#include <CLI/CLI.hpp>         // CLI::App
#include "llmc/utils/error.h"  // user_error

// False if --help was asked for, which has been printed then. Throws UserError.
inline bool parse_command_line(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e), false;
    user_error("%s; --help lists the options", e.what());
  }
  return true;
}
