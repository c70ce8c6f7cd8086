#include "checkpoint.h"
#include <cctype>               // isdigit
#include <cerrno>               // errno
#include <cstring>              // strerror
#include <filesystem>           // directory_iterator, remove_all, equivalent
#include <fstream>              // std::ifstream
#include <map>                  // std::map
#include <nlohmann/json.hpp>    // nlohmann::ordered_json
#include "config_json.h"        // write_config_json
#include "crc32c.h"             // crc32c
#include "durable_file.h"       // write_file_durably, rename_durably, sync_folder
#include "error.h"              // user_error, UserError

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;

static const char unfinished_prefix[] = "unfinished_step_";
static const char removed_prefix[] = "removed_step_";
static const int state_format = 2;

// ----------------------------------------------------------------------------
// Writing

static std::string hex(uint32_t checksum) { return format("%08x", unsigned(checksum)); }

static json to_json(const SafetensorsChecksums& sums) {
  json tensors = json::object();
  for (const auto& [name, checksum] : sums.tensors) tensors[name] = hex(checksum);
  return {{"header", hex(sums.header)}, {"tensors", tensors}};
}

// A JSON object's text, less the "\n}" at its end, completed by its own checksum as the last member. The checksum is of what stands
// before it, and what stands behind it is always the same: no byte can be another one unnoticed.
static std::string sealed(const std::string& body) {
  return body + ",\n \"checksum\": \"" + hex(crc32c(body.data(), body.size())) + "\"\n}\n";
}

static std::string state_text(const RunState& state, const json& checksums) {
  const json j = {{"format", state_format},
                  {"step", state.step},
                  {"next_window", state.next_window},
                  {"num_windows", state.num_windows},
                  {"seq_len", state.seq_len},
                  {"shuffle", state.shuffle},
                  {"seed", state.seed},
                  {"skipped_steps", state.skipped_steps},
                  {"bad_steps_in_row", state.bad_steps_in_row},
                  {"checksums", checksums}};
  const std::string text = j.dump(1);
  return sealed(text.substr(0, text.size() - 2));
}

std::string write_checkpoint(const std::string& out, const RunState& state, const ModelLayout& model,
                             const FetchTensor& fetch_weight, const FetchTensor& fetch_m, const FetchTensor& fetch_v) {
  const std::string number = format("%08lld", (long long)state.step);
  const std::string temporary = out + "/" + unfinished_prefix + number, folder = out + "/step_" + number;
  try {
    make_folders(temporary);
    json checksums;
    const std::string config = write_config_json(temporary + "/config.json", model.config);
    checksums["config.json"] = hex(crc32c(config.data(), config.size()));
    checksums["model.safetensors"] =
        to_json(write_tensors(temporary + "/model.safetensors", model, {{"", fetch_weight}}, /*zero_biases=*/true));
    checksums["optimizer.safetensors"] = to_json(
        write_tensors(temporary + "/optimizer.safetensors", model, {{".m", fetch_m}, {".v", fetch_v}}, /*zero_biases=*/false));
    write_file_durably(temporary + "/state.json", state_text(state, checksums));
    sync_folder(temporary);
    rename_durably(temporary, folder);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
    throw;
  }
  return folder;
}

// ----------------------------------------------------------------------------
// Which there are

// The step of a folder named step_<digits>, or -1.
static int64_t step_of(const std::string& name) {
  const std::string prefix = "step_";
  if (name.size() <= prefix.size() || name.size() > prefix.size() + 18 || name.compare(0, prefix.size(), prefix) != 0) return -1;
  for (size_t i = prefix.size(); i < name.size(); i++)
    if (!isdigit((unsigned char)name[i])) return -1;
  return std::stoll(name.substr(prefix.size()));
}

// The checkpoints in `out`, by step.
static std::map<int64_t, fs::path> checkpoints_in(const std::string& out) {
  std::error_code error;
  std::map<int64_t, fs::path> found;
  for (const fs::directory_entry& entry : fs::directory_iterator(out, error)) {
    const int64_t step = step_of(entry.path().filename().string());
    if (step >= 0 && entry.is_directory(error)) found[step] = entry.path();
  }
  return found;
}

std::string newest_checkpoint(const std::string& out, int64_t before) {
  const std::map<int64_t, fs::path> all = checkpoints_in(out);
  auto next = all.lower_bound(before);
  return next == all.begin() ? "" : std::prev(next)->second.string();
}

int64_t checkpoint_step(const std::string& out, const std::string& checkpoint) {
  std::error_code error;
  for (const auto& [step, path] : checkpoints_in(out))
    if (fs::equivalent(path, checkpoint, error)) return step;
  user_error("%s: is not a checkpoint in %s", checkpoint.c_str(), out.c_str());
}

void remove_old_checkpoints(const std::string& out, int64_t keep, int64_t keep_every) {
  const std::map<int64_t, fs::path> all = checkpoints_in(out);
  int64_t surplus = keep > 0 ? int64_t(all.size()) - keep : 0;
  for (const auto& [step, path] : all) {  // the oldest first
    if (surplus-- <= 0) break;
    if (keep_every > 0 && step % keep_every == 0) continue;
    const std::string away = out + "/" + removed_prefix + format("%08lld", (long long)step);
    rename_durably(path.string(), away);
    std::error_code error;
    fs::remove_all(away, error);
    if (error) user_error("%s: cannot be removed: %s", away.c_str(), error.message().c_str());
  }
}

void remove_unfinished_checkpoints(const std::string& out) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(out, error))
    for (const char* prefix : {unfinished_prefix, removed_prefix})
      if (entry.path().filename().string().rfind(prefix, 0) == 0) fs::remove_all(entry.path(), error);
}

std::vector<std::string> set_aside_checkpoints_after(const std::string& out, int64_t step) {
  std::vector<std::string> names;
  const std::map<int64_t, fs::path> all = checkpoints_in(out);
  for (auto it = all.upper_bound(step); it != all.end(); ++it) {
    const std::string plain = out + "/set_aside_" + it->second.filename().string();
    std::string name = plain;
    for (int n = 1; fs::exists(name); n++) name = plain + format(".%d", n);
    rename_durably(it->second.string(), name);
    names.push_back(name);
  }
  return names;
}

// ----------------------------------------------------------------------------
// Reading

static std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) user_error("%s: cannot be read: %s", path.c_str(), strerror(errno));
  return {std::istreambuf_iterator<char>(file), {}};
}

// state.json, if it is what write_checkpoint wrote.
static json read_state(const std::string& path) {
  const std::string text = read_text(path);
  const size_t seal = sealed("").size();
  if (text.size() < seal || sealed(text.substr(0, text.size() - seal)) != text)
    user_error("%s: is damaged, or of another version of this program: its checksum does not fit", path.c_str());
  json j = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!j.is_object() || !j.contains("format") || j["format"] != state_format)
    user_error("%s: is not of format %d, which this program knows", path.c_str(), state_format);
  return j;
}

// Calls f(state.json's object). A field that is missing or of another type is a UserError.
template <class F>
static void with_state(const std::string& checkpoint, F f) {
  const std::string path = checkpoint + "/state.json";
  const json j = read_state(path);
  try {
    f(j);
  } catch (const json::exception& e) {
    user_error("%s: is not a run's state (%s)", path.c_str(), e.what());
  }
}

static void demand_equal(const std::string& what, uint32_t found, const json& expected) {
  const std::string text = expected.get<std::string>();
  if (hex(found) != text)
    user_error("%s is damaged: its checksum is %s; state.json says %s", what.c_str(), hex(found).c_str(), text.c_str());
}

void verify_checkpoint(const std::string& checkpoint) {
  with_state(checkpoint, [&](const json& state) {
    const json& checksums = state.at("checksums");
    const std::string config_path = checkpoint + "/config.json", config = read_text(config_path);
    demand_equal(config_path + ":", crc32c(config.data(), config.size()), checksums.at("config.json"));
    for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
      const std::string path = checkpoint + "/" + name;
      const SafetensorsChecksums found = SafetensorsFile(path).checksums();
      const json& expected = checksums.at(name);
      demand_equal(path + ": its header", found.header, expected.at("header"));
      for (const auto& [tensor, checksum] : found.tensors)
        demand_equal(path + ": tensor " + tensor, checksum, expected.at("tensors").at(tensor));
    }
  });
}

std::string checkpoint_checksum(const std::string& checkpoint) {
  std::string checksum;
  with_state(checkpoint, [&](const json& state) { checksum = state.at("checksum").get<std::string>(); });
  return checksum;
}

RunState read_run_state(const std::string& checkpoint) {
  RunState state;
  with_state(checkpoint, [&](const json& j) {
    state = {j.at("step"), j.at("next_window"), j.at("num_windows"),   j.at("seq_len"),
             j.at("shuffle"), j.at("seed"),     j.at("skipped_steps"), j.at("bad_steps_in_row")};
  });
  if (state.step < 0 || state.next_window < 0 || state.num_windows < 1 || state.seq_len < 1 || state.skipped_steps < 0 ||
      state.skipped_steps > state.step || state.bad_steps_in_row < 0 || state.bad_steps_in_row > state.skipped_steps)
    user_error("%s/state.json: holds an impossible state", checkpoint.c_str());
  return state;
}

void read_weights(const std::string& folder, const ModelLayout& model, const StoreTensor& store_weight) {
  read_tensors(folder + "/model.safetensors", model, {{"", store_weight}});
}

void read_moments(const std::string& checkpoint, const ModelLayout& model, const StoreTensor& store_m,
                  const StoreTensor& store_v) {
  read_tensors(checkpoint + "/optimizer.safetensors", model, {{".m", store_m}, {".v", store_v}});
}
