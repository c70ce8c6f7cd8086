#include "checkpoint.h"
#include <cctype>               // isdigit
#include <filesystem>           // directory_iterator, remove_all
#include <fstream>              // std::ifstream
#include <nlohmann/json.hpp>    // nlohmann::ordered_json
#include "config_json.h"        // write_config_json
#include "durable_file.h"       // write_file_durably, rename_durably, sync_folder
#include "error.h"              // user_error, UserError

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;

static const char unfinished_prefix[] = "unfinished_step_";
static const int state_format = 1;

std::string write_checkpoint(const std::string& out, const RunState& state, const ModelLayout& model,
                             const FetchTensor& fetch_weight, const FetchTensor& fetch_m, const FetchTensor& fetch_v) {
  const std::string number = format("%08lld", (long long)state.step);
  const std::string temporary = out + "/" + unfinished_prefix + number, folder = out + "/step_" + number;
  try {
    make_folders(temporary);
    write_config_json(temporary + "/config.json", model.config);
    write_tensors(temporary + "/model.safetensors", model, {{"", fetch_weight}}, /*zero_biases=*/true);
    write_tensors(temporary + "/optimizer.safetensors", model, {{".m", fetch_m}, {".v", fetch_v}}, /*zero_biases=*/false);
    json j = {{"format", state_format},           {"step", state.step},       {"next_window", state.next_window},
              {"num_windows", state.num_windows}, {"seq_len", state.seq_len}, {"shuffle", state.shuffle},
              {"seed", state.seed}};
    write_file_durably(temporary + "/state.json", j.dump(1) + "\n");
    sync_folder(temporary);
    rename_durably(temporary, folder);
  } catch (const UserError&) {
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
    throw;
  }
  return folder;
}

// The step of a folder named step_<digits>, or -1.
static int64_t step_of(const std::string& name) {
  const std::string prefix = "step_";
  if (name.size() <= prefix.size() || name.size() > prefix.size() + 18 || name.compare(0, prefix.size(), prefix) != 0) return -1;
  for (size_t i = prefix.size(); i < name.size(); i++)
    if (!isdigit((unsigned char)name[i])) return -1;
  return std::stoll(name.substr(prefix.size()));
}

std::string newest_checkpoint(const std::string& out) {
  std::error_code error;
  std::string newest;
  int64_t newest_step = -1;
  for (const fs::directory_entry& entry : fs::directory_iterator(out, error)) {
    int64_t step = step_of(entry.path().filename().string());
    if (step > newest_step && entry.is_directory()) newest_step = step, newest = entry.path().string();
  }
  return newest;
}

void remove_unfinished_checkpoints(const std::string& out) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(out, error))
    if (entry.path().filename().string().rfind(unfinished_prefix, 0) == 0) fs::remove_all(entry.path(), error);
}

RunState read_run_state(const std::string& checkpoint) {
  const std::string path = checkpoint + "/state.json";
  std::ifstream file(path);
  json j = json::parse(file, nullptr, /*allow_exceptions=*/false);
  RunState state;
  try {
    if (j.at("format").get<int>() != state_format)
      user_error("%s: has format %s; this program knows %d", path.c_str(), j.at("format").dump().c_str(), state_format);
    state = {j.at("step"), j.at("next_window"), j.at("num_windows"), j.at("seq_len"), j.at("shuffle"), j.at("seed")};
  } catch (const json::exception& e) {
    user_error("%s: is not a run's state (%s); resume from another checkpoint", path.c_str(), e.what());
  }
  if (state.step < 0 || state.next_window < 0 || state.num_windows < 1 || state.seq_len < 1)
    user_error("%s: holds an impossible state; resume from another checkpoint", path.c_str());
  return state;
}

void read_weights(const std::string& folder, const ModelLayout& model, const StoreTensor& store_weight) {
  read_tensors(folder + "/model.safetensors", model, {{"", store_weight}});
}

void read_moments(const std::string& checkpoint, const ModelLayout& model, const StoreTensor& store_m,
                  const StoreTensor& store_v) {
  read_tensors(checkpoint + "/optimizer.safetensors", model, {{".m", store_m}, {".v", store_v}});
}
