// Options of programs, by CLI11.
#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include "llmc/utils/error.h"
#include "llmc/utils/number.h"

// The text of a number as CLI11 reads it right: by itself it takes 010 for 8, and a whole number that no int64 holds
// for the largest one. Returns what is wrong with it, or "".
inline std::string check_number(std::string& text, bool is_whole) {
  try {
    text = is_whole ? std::to_string(parse_number<int64_t>(text)) : format("%.17g", parse_number<double>(text));
    return "";
  } catch (const UserError& e) { return e.what(); }
}

// False if --help was asked for, which has been printed then. Throws UserError.
inline bool parse_command_line(CLI::App& app, int argc, char** argv) {
  for (CLI::Option* option : app.get_options()) {
    const std::string type = option->get_type_name();
    const bool is_whole = type == "INT" || type == "UINT";
    auto check = [is_whole, may_be_negative = type != "UINT"](std::string& text) {
      const std::string wrong = check_number(text, is_whole);
      return wrong.empty() && !may_be_negative && text[0] == '-' ? text + ": must not be negative" : wrong;
    };
    if (is_whole || type == "FLOAT") option->transform(CLI::Validator(check, ""));
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e), false;
    user_error("%s; --help lists the options", e.what());
  }
  return true;
}
