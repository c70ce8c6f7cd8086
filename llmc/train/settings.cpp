#include "settings.h"
#include <algorithm>
#include <set>
#include <type_traits>
#include "llmc/wiring/wiring.h"
#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "options.h"
#include "run_history.h"

// The values in a description may be lists and descriptions, too, which are no settings.
Settings settings_of(const LogFields& description) {
  Settings settings;
  for (const LogField& field : description)
    std::visit(
        [&, key = field.key](const auto& value) {
          if constexpr (std::is_constructible_v<Scalar, decltype(value)>) settings[key] = value;
        },
        field.value);
  return settings;
}

const Settings& default_settings() {
  static const Settings settings = [] {
    Settings result;
    TrainOptions defaults;
    for (const Option& option : train_options(defaults))
      if (const auto value = option.value(); option.on_resume != OnResume::ignored && value)
        result[option.key] = *value;
    result.erase("learning_rate");  // all versions have it, and the first did not record it
    return result;
  }();
  return settings;
}

static bool has_log(const std::string& out) { return path_exists(files_of_run(out)[0]); }

Settings recorded_settings(const std::string& out, const RunState* saved) {
  Settings settings;
  if (has_log(out)) {  // a checkpoint can be resumed without
    const RunHistory history = read_run(out, /*with_positions=*/false);
    for (const auto& [key, value] : history.description_of(saved ? saved->step : history.last_step()).items())
      if (value.is_primitive() && !value.is_null()) settings[key] = scalar_of(value);
  }
  if (saved == nullptr) return settings;
  for (const auto& [key, value] : saved->options) settings[key] = value;
  settings.insert(default_settings().begin(), default_settings().end());
  return settings;
}

bool log_is_finished(const std::string& out) {
  return has_log(out) && read_run(out, /*with_positions=*/false).is_finished();
}

static const std::set<std::string> not_compared = {"train_data", "val_data", "grad_accum_steps", "ranks", "device"};

// The text by which a value is compared. Wirings are compared by their canonical text; a damaged log may have none.
static std::string comparable_text(const std::string& key, const Scalar& value) {
  const std::string text = text_of(value);
  if (key != "wiring") return text;
  try {
    return canonical_text(parse_wiring(text));
  } catch (const UserError&) { return text; }
}

static std::string shown(const Scalar& value) {
  const std::string text = text_of(value);
  return text.empty() ? "none" : text;
}

static std::string name_of(const std::string& key, const Option* option) {
  if (key == train_checksum_key) return "training data (-i), by their checksum";
  if (key == model_checksum_key) return "weights to start from (-e), by their checksum";
  if (key == val_checksum_key) return "validation data (-j), by their checksum";
  std::string name = option != nullptr && option->what != nullptr ? option->what : key;
  std::replace(name.begin(), name.end(), '_', ' ');
  return option != nullptr ? name + " (" + option->flag() + ")" : name;
}

std::vector<SettingDifference> differences(const OptionTable& options, const Settings& before, const Settings& now) {
  std::vector<SettingDifference> found;
  for (const auto& [key, value] : now) {
    const auto it = before.find(key);
    if (not_compared.count(key) + derived_fields.count(key) > 0 || it == before.end() ||
        comparable_text(key, it->second) == comparable_text(key, value))
      continue;
    const auto option = std::find_if(options.begin(), options.end(),
                                     [&, k = key](const Option& o) { return o.key != nullptr && k == o.key; });
    const Option* decides = option == options.end() ? nullptr : &*option;
    found.push_back({key, decides, name_of(key, decides), shown(it->second), shown(value)});
  }
  return found;
}
