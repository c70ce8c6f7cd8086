// An option of the command line: all that there is to say of it, said once. What the command line takes, the errors for
// values that make no sense, config.toml, the log's first line and the comparison with a run that is resumed follow
// from it. The trainer's options are in options.cpp.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>
#include "llmc/base/number.h"
#include "llmc/base/scalar.h"

// Which values an option takes.
struct Range {
  std::string must;                          // what it must do: "be at least 1"
  std::function<bool(const Scalar&)> holds;  // whether a value does
};
Range at_least(double least);
Range above(double low);                 // as a float, which it is rounded to
Range between(double low, double high);  // both included
// [low, high), also when it is rounded, as its use does: to a multiple of 1 / steps, or to a float.
Range between_excluding_end(double low, double high, double steps = 0);
Range zero_or_at_least(double least, const char* unit);
Range one_of(const std::vector<std::string>& names);

// "a, b or c".
std::string either(const std::vector<std::string>& names);

// What happens if a run is resumed, before its last step, with another value of an option than before.
enum class OnResume { ignored, warned_of, refused };

struct Option {
  std::string flags;                    // "-b,--micro-batch"; messages use the first one, config files the long one
  std::string group, help;              // as --help shows them
  const char* type;                     // INT, FLOAT, TEXT; "": a flag
  const char* value_follows = nullptr;  // as --help shows the value that may follow a flag: "[0|1]"
  bool in_config = true;                // config.toml has it
  const char* key = nullptr;  // in the log's description of the run and in a checkpoint's state; null: it is not logged
  OnResume on_resume = OnResume::ignored;
  const char* what = nullptr;  // what a message about another value on resuming calls it; null: as the key does
  std::optional<Range> range;
  struct Need {
    const char *flag, *message;
  };
  std::vector<Need> needs;  // other options without which this one makes no sense, and what is said then

  std::function<void(const std::string&)> set;   // from text; throws UserError if that is no value of its type
  std::function<std::optional<Scalar>()> value;  // none: not given, and there is no default
  std::optional<Scalar> initial;                 // when the table was made: the default

  std::string flag() const { return flags.substr(0, flags.find(',')); }
  std::string name() const { return flags.substr(flags.find("--") + 2); }
  bool is_flag() const { return *type == '\0'; }
  bool is_set() const { return value() != initial; }

  // These set an option's other fields, beyond its flags, its value, its help and its range.
  Option& logged(const char* log_key, OnResume other_value = OnResume::ignored) {
    return key = log_key, on_resume = other_value, *this;
  }
  Option& called(const char* name) { return what = name, *this; }
  Option& needing(const char* other, const char* message) { return needs.push_back({other, message}), *this; }
  Option& not_in_config() { return in_config = false, *this; }
  Option& with_value(const char* text) { return value_follows = text, *this; }
};

// The bool that a text says: true, false, 1, 0, or "", which is true. Throws UserError, which begins with another text.
bool parse_flag(const std::string& text);

// The options of a program, in the order of --help.
struct OptionTable {
  std::vector<Option> options;
  const char* group = "Options";  // of those that are added next

  // `value`: where the option's value lies, now its default; it stays where it is as long as the table does. A bool is
  // a flag.
  template <class T>
  Option& add(const char* flags, T& value, std::string help, std::optional<Range> range = {}) {
    using Value = typename decltype(std::optional(value))::value_type;  // T, or that of an optional T
    constexpr bool is_flag = std::is_same_v<Value, bool>, is_text = std::is_same_v<Value, std::string>;
    Option option;
    option.flags = flags, option.group = group, option.help = std::move(help);
    option.range = std::move(range);
    option.type = is_flag ? "" : is_text ? "TEXT" : std::is_integral_v<Value> ? "INT" : "FLOAT";
    option.set = [&value](const std::string& text) {
      if constexpr (is_flag) value = parse_flag(text);
      else if constexpr (is_text) value = text;
      else value = parse_number<Value>(text);
    };
    option.value = [&value]() -> std::optional<Scalar> {
      const std::optional<Value> known = value;
      return known ? std::optional<Scalar>(*known) : std::nullopt;
    };
    option.initial = option.value();
    return options.emplace_back(std::move(option));
  }

  auto begin() const { return options.begin(); }
  auto end() const { return options.end(); }
  // The option whose first flag this is.
  const Option& operator[](const std::string& flag) const;
};
