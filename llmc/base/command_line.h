// Options of programs, by CLI11.
#pragma once
#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <vector>
#include "llmc/base/error.h"
#include "llmc/base/number.h"
#include "llmc/base/text.h"

// What is said of an argument that no option of the program takes.
inline std::string unexpected_argument(const CLI::App& app, const std::string& argument) {
  if (argument.compare(0, 1, "-") != 0) return argument + ": is not expected";
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  }
  const std::string name = argument.substr(0, argument.find('=')), nearest = nearest_name(name, names);
  return name + ": no such option" + (nearest.empty() ? "" : "; did you mean " + nearest + "?");
}

// False if --help was asked for, which has been printed then. Throws UserError.
inline bool parse_command_line(CLI::App& app, int argc, char** argv) {
  for (CLI::Option* option : app.get_options()) {
    const std::string type = option->get_type_name();  // what checks say of themselves follows
    const bool is_unsigned = begins_with(type, "UINT"), is_whole = is_unsigned || begins_with(type, "INT");
    // By itself CLI11 takes 010 for 8, and a whole number that no int64 holds for the largest one.
    auto check = [is_whole, is_unsigned](std::string& text) -> std::string {
      try {
        text = is_whole ? std::to_string(parse_number<int64_t>(text)) : format("%.17g", parse_number<double>(text));
      } catch (const UserError& e) { return e.what(); }
      return is_unsigned && text[0] == '-' ? text + ": must not be negative" : "";
    };
    if (is_whole || begins_with(type, "FLOAT")) option->transform(CLI::Validator(check, ""));
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ExtrasError&) {
    std::vector<std::string> extra = app.remaining();
    const auto is_option = [](const std::string& argument) { return argument.compare(0, 1, "-") == 0; };
    const auto first = std::find_if(extra.begin(), extra.end(), is_option);
    user_error("%s; --help lists the options", unexpected_argument(app, first == extra.end() ? extra[0] : *first));
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e), false;
    user_error("%s; --help lists the options", e.what());
  }
  return true;
}
