#include "checkpoint.h"
#include <unistd.h>
#include <filesystem>
#include <nlohmann/json.hpp>
#include "llmc/base/crc32c.h"
#include "llmc/base/files.h"
#include "llmc/base/error.h"
#include "llmc/base/json.h"
#include "llmc/base/number.h"
#include "llmc/base/text.h"

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;

static const char unfinished_prefix[] = "unfinished_step_";
static const char removed_prefix[] = "removed_step_";
static const char memory_file[] = "memory.safetensors";
static const int state_format = 3;

// ----------------------------------------------------------------------------
// Writing

static json to_json(const SafetensorsChecksums& sums) {
  json tensors = json::object();
  for (const auto& [name, checksum] : sums.tensors) tensors[name] = crc32c_hex(checksum);
  return {{"header", crc32c_hex(sums.header)}, {"tensors", tensors}};
}

// A JSON object's text, less the "\n}" at its end, completed by its own checksum as the last member. The checksum is of
// what stands before it, and what stands after it is always the same: any changed byte is noticed.
static std::string sealed(const std::string& body) {
  return body + ",\n \"checksum\": \"" + crc32c_hex(crc32c(body.data(), body.size())) + "\"\n}\n";
}

// Calls visit(key in state.json, a reference to the value) for everything in a state but the options. `s` may be const.
template <class State, class Visit>
static void visit_progress(State& s, Visit visit) {
  visit("step", s.step);
  visit("next_window", s.next_sequence);  // as in older versions
  visit("num_windows", s.num_sequences);
  visit("skipped_steps", s.skipped_steps);
  visit("bad_steps_in_row", s.bad_steps_in_row);
}

static std::string state_text(const RunState& state, const json& checksums) {
  json j = {{"format", state_format}};
  visit_progress(state, [&](const char* key, int64_t value) { j[key] = value; });
  if (state.loss_scale > 0) j["loss_scale"] = state.loss_scale, j["good_updates"] = state.good_updates;
  for (const auto& option : state.options) {
    CHECK(!j.contains(option.first));
    std::visit([&](const auto& value) { j[option.first] = value; }, option.second);
  }
  j["checksums"] = checksums;
  const std::string text = j.dump(1);
  return sealed(text.substr(0, text.size() - 2));
}

// A step's folder with a prefix in its name.
static std::string folder_in(const std::string& out, const char* prefix, int64_t step) {
  return out + "/" + prefix + format("%08lld", (long long)step);
}

// {"step": 1000, "pieces": {"wte.weight.m": [elements, checksum], ...}}
static std::string report_text(int64_t step, const ParameterTable& table, const std::vector<MomentPiece>& pieces) {
  const std::vector<SafetensorsSpec> specs = moment_specs(table);
  json by_tensor = json::object();
  for (size_t i = 0; i < specs.size(); i++) by_tensor[specs[i].name] = {pieces[i].count, pieces[i].checksum};
  return json({{"step", step}, {"pieces", by_tensor}}).dump();
}

static std::string report_path(const std::string& folder, int rank) { return folder + format("/rank_%d.json", rank); }

void write_checkpoint_shard(const std::string& out, int64_t step, const ParameterTable& table, const float* m,
                            const float* v) {
  const std::string folder = folder_in(out, unfinished_prefix, step);
  const std::vector<MomentPiece> pieces = write_moment_shard(folder + "/optimizer.safetensors", table, m, v);
  write_file_in_unfinished_folder(report_path(folder, table.shard.index), report_text(step, table, pieces));
}

// What a rank reports to have written, in the order of moment_specs. Throws UserError if there is no report, or not of
// what its shard holds.
static std::vector<MomentPiece> take_report(const std::string& folder, int rank, int64_t step,
                                            const ParameterTable& table) {
  const std::string path = report_path(folder, rank);
  const std::optional<std::string> report = try_read_file(path);
  if (!report) user_error("rank %d could not write its shard of %s; its own message says why", rank, folder);
  ParameterTable its_table = table;
  its_table.shard.index = rank;
  const std::vector<SafetensorsSpec> specs = moment_specs(table);
  std::vector<MomentPiece> pieces;
  try {
    const json j = json::parse(*report), &by_tensor = j.at("pieces");
    if (j.at("step") != step)
      user_error("rank %d reports on step %s, not on %lld", rank, j["step"].dump(), (long long)step);
    for (size_t i = 0; i < specs.size(); i++) {
      const json& piece = by_tensor.at(specs[i].name);
      const FilePart part = own_moment(its_table, int(i % table.specs.size()));
      pieces.push_back({part.count, piece.at(1).get<uint32_t>()});
      if (piece != json({pieces[i].count, pieces[i].checksum}))
        user_error("rank %d reports %s for tensor %s, of which its shard has %lld elements", rank, piece.dump(),
                   specs[i].name, (long long)part.count);
    }
  } catch (const json::exception& e) { user_error("rank %d did not report what it wrote (%s)", rank, e.what()); }
  unlink(path.c_str());
  return pieces;
}

// The tensors' checksums, joined from the checksums of their pieces, [rank][tensor].
static SafetensorsChecksums join_pieces(uint32_t header, const ParameterTable& table,
                                        const std::vector<std::vector<MomentPiece>>& pieces) {
  SafetensorsChecksums sums;
  sums.header = header;
  for (const SafetensorsSpec& spec : moment_specs(table)) {
    uint32_t checksum = 0;
    for (const std::vector<MomentPiece>& of_rank : pieces) {
      const MomentPiece& piece = of_rank[sums.tensors.size()];
      checksum = crc32c_combine(checksum, piece.checksum, uint64_t(piece.count) * sizeof(float));
    }
    sums.tensors.push_back({spec.name, checksum});
  }
  return sums;
}

// Writes a file of these tensors. Returns what state.json says of it.
static json write_tensors(const std::string& path, const std::vector<CheckpointTensor>& tensors) {
  std::vector<SafetensorsSpec> specs;
  for (const CheckpointTensor& tensor : tensors) specs.push_back({tensor.name, tensor.shape});
  SafetensorsWriter file(path, specs);
  SafetensorsChecksums sums;
  sums.header = file.header_checksum();
  for (size_t i = 0; i < tensors.size(); i++) {
    const std::vector<float>& values = tensors[i].values;
    file.write_f32(i, values.data(), 0, int64_t(values.size()));
    sums.tensors.push_back({tensors[i].name, crc32c(values.data(), values.size() * sizeof(float))});
  }
  file.finish();
  return to_json(sums);
}

static void await(const OtherShards& others) {
  while (others.are_written && !others.are_written()) usleep(10000);
}

// Writes all files but state.json into the folder `temporary`. Returns what state.json says of them.
static json write_files(const std::string& temporary, const ParameterTable& table, const CheckpointContents& c,
                        const OtherShards& others) {
  const std::string moments = temporary + "/optimizer.safetensors";
  json checksums;
  for (const auto& [name, text] : c.files) {
    write_file_in_unfinished_folder(temporary + "/" + name, text);
    checksums[name] = crc32c_hex(crc32c(text.data(), text.size()));
  }
  checksums["model.safetensors"] = to_json(write_weight_file(temporary + "/model.safetensors", table, c.fetch_weight));
  if (!c.memory.empty()) checksums[memory_file] = write_tensors(temporary + "/" + memory_file, c.memory);
  std::vector<std::vector<MomentPiece>> pieces = {write_moment_shard(moments, table, c.m, c.v)};
  await(others);
  for (int rank = 1; rank < table.shard.count; rank++)
    pieces.push_back(take_report(temporary, rank, c.state.step, table));
  checksums["optimizer.safetensors"] = to_json(join_pieces(others.header, table, pieces));
  return checksums;
}

uint32_t lay_out_checkpoint(const std::string& out, int64_t step, const ParameterTable& table) {
  const std::string folder = folder_in(out, unfinished_prefix, step);
  if (!is_folder(out)) user_error("%s: is no longer there", out);
  try {
    make_folders(folder);
    return lay_out_moment_file(folder + "/optimizer.safetensors", table);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(folder, ignored);
    throw;
  }
}

std::string write_checkpoint(const std::string& out, const ParameterTable& table, const CheckpointContents& contents,
                             const OtherShards& others) {
  CHECK(table.shard.index == 0 && bool(others.are_written) == (table.shard.count > 1));
  const int64_t step = contents.state.step;
  const std::string temporary = folder_in(out, unfinished_prefix, step), folder = folder_in(out, "step_", step);
  OtherShards shards = others;
  try {
    if (!others.are_written) shards.header = lay_out_checkpoint(out, step, table);
    const json checksums = write_files(temporary, table, contents, shards);
    write_file_in_unfinished_folder(temporary + "/state.json", state_text(contents.state, checksums));
    sync_folder(temporary);
    rename_durably(temporary, folder);
  } catch (...) {
    await(others);  // no rank writes into a folder that is being removed
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
    throw;
  }
  return folder;
}

// ----------------------------------------------------------------------------
// Which there are

// The step of a folder that folder_in names with this prefix, or -1.
static int64_t step_of(const std::string& name, const std::string& prefix = "step_") {
  const std::string digits = name.substr(std::min(name.size(), prefix.size()));
  if (digits.empty() || digits.size() > 18 || digits.find_first_not_of("0123456789") != std::string::npos) return -1;
  const int64_t step = parse_number<int64_t>(digits);
  return name == prefix + format("%08lld", (long long)step) ? step : -1;
}

std::map<int64_t, std::string> checkpoints_in(const std::string& out) {
  std::error_code error;
  std::map<int64_t, std::string> found;
  for (const fs::directory_entry& entry : fs::directory_iterator(out, error)) {
    const int64_t step = step_of(entry.path().filename().string());
    if (step >= 0 && entry.is_directory(error)) found[step] = entry.path().string();
  }
  return found;
}

std::string newest_checkpoint(const std::string& out, int64_t before) {
  const std::map<int64_t, std::string> all = checkpoints_in(out);
  auto next = all.lower_bound(before);
  return next == all.begin() ? "" : std::prev(next)->second;
}

std::string model_folder(const std::string& path) {
  const std::string newest = path_exists(path + "/config.json") ? "" : newest_checkpoint(path);
  if (newest.empty()) return path;
  fprintf(stderr, "%s: is a run's folder; its newest checkpoint is %s\n", path.c_str(), newest.c_str());
  return newest;
}

int64_t checkpoint_step(const std::string& out, const std::string& checkpoint) {
  std::error_code error;
  for (const auto& [step, path] : checkpoints_in(out))
    if (fs::equivalent(path, checkpoint, error)) return step;
  user_error("%s: is not a checkpoint in %s", checkpoint, out);
}

void remove_old_checkpoints(const std::string& out, int64_t keep, int64_t keep_every) {
  std::map<int64_t, std::string> all = checkpoints_in(out);
  for (auto it = all.begin(); it != all.end();)
    it = path_exists(it->second + "/state.json") && !fs::is_symlink(it->second) ? std::next(it) : all.erase(it);
  int64_t surplus = keep > 0 ? int64_t(all.size()) - keep : 0;
  std::string failure;
  for (const auto& [step, path] : all) {  // the oldest first
    if (surplus-- <= 0) break;
    if (keep_every > 0 && step % keep_every == 0) continue;
    const std::string away = folder_in(out, removed_prefix, step);
    try {
      rename_durably(path, away);
      std::error_code error;
      fs::remove_all(away, error);
      if (error) user_error("%s: cannot be removed: %s", away, error.message());
    } catch (const UserError& e) { failure = failure.empty() ? e.what() : failure; }
  }
  if (!failure.empty()) throw UserError(failure);
}

void remove_unfinished_checkpoints(const std::string& out) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(out, error))
    for (const char* prefix : {unfinished_prefix, removed_prefix})
      if (step_of(entry.path().filename().string(), prefix) >= 0 && fs::is_directory(entry.symlink_status(error)))
        fs::remove_all(entry.path(), error);
}

std::vector<std::string> set_aside_checkpoints_after(const std::string& out, int64_t step) {
  std::vector<std::string> names;
  const std::map<int64_t, std::string> all = checkpoints_in(out);
  for (auto it = all.upper_bound(step); it != all.end(); ++it) {
    const std::string plain = out + "/set_aside_" + fs::path(it->second).filename().string();
    std::string name = plain;
    for (int n = 1; path_exists(name); n++) name = plain + format(".%d", n);
    rename_durably(it->second, name);
    names.push_back(name);
  }
  return names;
}

// ----------------------------------------------------------------------------
// Reading

// state.json, if it is what write_checkpoint wrote.
static json read_state(const std::string& path) {
  const std::string text = read_whole_file(path);
  const size_t seal = sealed("").size();
  if (text.size() < seal || sealed(text.substr(0, text.size() - seal)) != text)
    user_error("%s: is damaged, or of another version of this program: its checksum does not fit", path);
  json j = parse_json(text);
  if (!j.is_object() || !j.contains("format") || j["format"] != state_format)
    user_error("%s: is not of format %d, which this program knows", path, state_format);
  return j;
}

// Calls f(state.json's object). A field that is missing or of another type is a UserError.
template <class F>
static void with_state(const std::string& checkpoint, F f) {
  const std::string path = checkpoint + "/state.json";
  const json j = read_state(path);
  try {
    f(j);
  } catch (const json::exception& e) { user_error("%s: is not a run's state (%s)", path, words_of(e)); }
}

static void demand_equal(const std::string& what, uint32_t found, const json& expected) {
  const std::string text = expected.get<std::string>();
  if (crc32c_hex(found) != text)
    user_error("%s is damaged: its checksum is %s; state.json says %s", what, crc32c_hex(found), text);
}

// Throws UserError unless the text files and these files of tensors are what was written.
static void verify_files(const std::string& checkpoint, const std::vector<std::string>& files_of_tensors) {
  with_state(checkpoint, [&](const json& state) {
    const json& checksums = state.at("checksums");
    for (const auto& [name, checksum] : checksums.items()) {
      if (!checksum.is_string()) continue;  // a file of tensors has several
      const std::string path = checkpoint + "/" + name, text = read_whole_file(path);
      demand_equal(path + ":", crc32c(text.data(), text.size()), checksum);
    }
    for (const std::string& name : files_of_tensors) {
      if (name == memory_file && !checksums.contains(name)) continue;
      const std::string path = checkpoint + "/" + name;
      const SafetensorsChecksums found = SafetensorsFile(path).checksums();
      const json& expected = checksums.at(name);
      demand_equal(path + ": its header", found.header, expected.at("header"));
      for (const auto& [tensor, checksum] : found.tensors)
        demand_equal(path + ": tensor " + tensor, checksum, expected.at("tensors").at(tensor));
    }
  });
}

void verify_checkpoint(const std::string& checkpoint) {
  verify_files(checkpoint, {"model.safetensors", "optimizer.safetensors", memory_file});
}

void verify_model(const std::string& folder, bool with_weights) {
  if (!path_exists(folder + "/state.json")) return;
  try {
    verify_files(folder, with_weights ? std::vector<std::string>{"model.safetensors"} : std::vector<std::string>());
  } catch (const UserError& e) {
    user_error("%s; copy the checkpoint again, or, if it was changed on purpose, remove state.json: without it the "
               "folder is a model like any other",
               e.what());
  }
}

std::string checkpoint_checksum(const std::string& checkpoint) {
  std::string checksum;
  with_state(checkpoint, [&](const json& state) { checksum = state.at("checksum").get<std::string>(); });
  return checksum;
}

uint32_t weights_checksum(const std::string& folder) {
  uint32_t all = 0;
  for (const std::string& path : weight_files(folder))
    for (const auto& [name, checksum] : SafetensorsFile(path).checksums().tensors)
      all = crc32c(&checksum, sizeof checksum, crc32c(name.data(), name.size(), all));
  return all;
}

std::vector<std::string> files_of_model(const std::string& folder) {
  std::set<std::string> names = list_folder(folder);
  names.insert({"../log.jsonl", "../config.toml", "../lock"});
  std::vector<std::string> files;
  for (const std::string& name : names) files.push_back(folder + "/" + name);
  return files;
}

RunState read_run_state(const std::string& checkpoint) {
  RunState state;
  bool is_possible = true;
  with_state(checkpoint, [&](json options) {
    visit_progress(state, [&](const char* key, int64_t& value) {
      value = options.at(key);
      is_possible &= options.at(key).is_number_integer() && value >= 0 && value < int64_t(1) << 53;
      options.erase(key);
    });
    state.loss_scale = options.value("loss_scale", int64_t(0));
    state.good_updates = options.value("good_updates", int64_t(0));
    for (const char* key : {"format", "checksums", "checksum", "loss_scale", "good_updates"}) options.erase(key);
    for (const auto& [key, value] : options.items()) state.options.push_back({key, scalar_of(value)});
  });
  if (!is_possible || state.num_sequences < 1 || state.skipped_steps > state.step ||
      state.bad_steps_in_row > state.skipped_steps || state.loss_scale < 0 ||
      (state.loss_scale & (state.loss_scale - 1)) != 0 || state.good_updates < 0)
    user_error("%s/state.json: holds an impossible state", checkpoint);
  return state;
}

void read_weights(const std::string& folder, const ParameterTable& table, const StoreTensor& store_weight) {
  verify_model(folder);
  read_weight_files(weight_files(folder), table, store_weight);
}

std::vector<CheckpointTensor> read_memory(const std::string& checkpoint) {
  const std::string path = checkpoint + "/" + memory_file;
  std::vector<CheckpointTensor> tensors;
  bool exists = false;
  with_state(checkpoint, [&](const json& state) { exists = state.at("checksums").contains(memory_file); });
  if (!exists) return tensors;
  const SafetensorsFile file(path);
  for (const SafetensorsTensor& t : file.tensors()) {
    tensors.push_back({t.name, t.shape, std::vector<float>(size_t(t.num_elements()))});
    file.read_f32(t, tensors.back().values.data());
  }
  return tensors;
}

void read_moments(const std::string& checkpoint, const ParameterTable& table, const StoreTensor& store_m,
                  const StoreTensor& store_v) {
  read_moment_shard(checkpoint + "/optimizer.safetensors", table, store_m, store_v);
}
