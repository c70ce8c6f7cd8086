// What lies in a model's or a run's folder and is no such file: pipes, devices, files of other kinds and damaged ones.
// And what control groups leave a process. Runs from the repository's root, where the programs of fp32 on the CPU,
// report and data/convert lie.
// COVERS llmc/base/files.cpp llmc/base/cgroup.h llmc/formats/checkpoint.cpp llmc/formats/model_file.cpp
// COVERS llmc/formats/config_json.cpp llmc/train/stop_signal.h llmc/text/vocabulary_file.cpp
#include <sys/stat.h>
#include <cmath>
#include <array>
#include <limits>
#include <set>
#include <nlohmann/json.hpp>
#include "child.h"
#include "command_line.h"
#include "helpers.h"
#include "llmc/formats/checkpoint.h"
#include "llmc/formats/model_file.h"
#include "llmc/train/run_history.h"
#include "llmc/text/tokenizer.h"
#include "llmc/base/cgroup.h"
#include "llmc/base/files.h"
#include "llmc/base/meminfo.h"

static const std::string sampler = "build/fp32/sample_gpt2_sla_cpu ", convert = "data/convert ", report = "./report ";
static const std::string model = "dev/test/golden/baseline";  // plain, of bytes, context length 32

// ----------------------------------------------------------------------------
// Files that are read whole

using SmallFile = FolderTest;

TEST_F(SmallFile, IsARegularOneAtTheEndOfLinks) {
  ASSERT_EQ(mkfifo(in("pipe").c_str(), 0666), 0);
  fs::create_symlink(in("pipe"), in("to_pipe"));
  fs::create_symlink("/dev/zero", in("to_device"));
  fs::create_symlink(write("file", "text"), in("to_file"));
  for (const char* name : {"pipe", "to_pipe", "to_device"}) {
    EXPECT_ERROR(read_whole_file(in(name)), std::string(name) + ": is a pipe or a device");
    EXPECT_ERROR(try_read_file(in(name)), std::string(name) + ": is a pipe or a device");
  }
  EXPECT_EQ(read_whole_file(in("to_file")), "text");
  EXPECT_EQ(try_read_file(in("none")), std::nullopt);
  EXPECT_ERROR(read_whole_file(folder), "cannot be read: Is a directory");
  EXPECT_NE(read_whole_file("/proc/self/status"), "") << "which says that it has no byte";
}

using CheckpointFolder = CommandLine;

// A model that the evaluator and the sampler read as another wiring is what the trainer continues with.
TEST_F(CheckpointFolder, IsReadAsAnotherWiringOfTheSameWeights) {
  const std::string text = write("text", "The quick brown fox jumps over the lazy dog. It was not the first time."),
                    tokens = write("data.bin", shard_of_documents(2000)),
                    documents = write("documents.bin", shard_of_documents(50));
  const auto evaluated = [&](const std::string& folder, const std::string& more) {
    const std::string json = in("result.json");
    const Outcome o =
        run("build/fp32/evaluate_gpt2_sla_cpu " + folder + " " + text + " " + documents + " --json " + json + more);
    EXPECT_EQ(o.exit_status, 0) << o.err;
    return nlohmann::json::parse(read_file(json));
  };
  std::set<double> losses, of_documents;
  for (const std::string wiring :
       {"plain", "share(2)", "sla(1,2)", "gqa(1)", "window(4)", "route(0.9)", "rope", "untied", "documents"}) {
    const std::string other = " --wiring '" + wiring + "'", out = in("of " + wiring), draw = " --prompt T -n 9 -q";
    // `model` names no end of text.
    const std::string from = wiring == "documents" ? "'" + in("of plain") + "/step_00000001'" : model;
    const Outcome trained = run("build/fp32/train_gpt2_sla_cpu -e " + from + other + " -i " + tokens +
                                " -t 16 -b 1 -x 1 -l 0 -v 0 -o '" + out + "'");
    ASSERT_EQ(trained.exit_status, 0) << trained.err;
    const nlohmann::json as = evaluated(from, other), of = evaluated("'" + out + "'", "");
    for (int i : {0, 1}) EXPECT_EQ(as["texts"][i]["loss"], of["texts"][i]["loss"]) << wiring;
    EXPECT_EQ(as["wiring"], wiring);
    losses.insert(double(as["texts"][0]["loss"])), of_documents.insert(double(as["texts"][1]["loss"]));
    const Outcome sampled = run(sampler + from + other + draw);
    EXPECT_EQ(sampled.out, run(sampler + "'" + out + "'" + draw).out) << wiring;
    EXPECT_EQ(sampled.err.find("is read as " + wiring + "; what changes:\n") != std::string::npos, wiring != "plain")
        << sampled.err;
  }
  EXPECT_EQ(losses.size(), 6u) << "each has a loss of its own but route and untied, which begin as plain, and "
                                  "documents";
  EXPECT_EQ(of_documents.size(), 7u);
  const std::string shared = "'" + in("of share(2)") + "'";
  for (const auto& [folder, wiring, missing] :
       std::vector<std::array<std::string, 3>>{{shared, "plain", "rows of layer 1's c_attn"},
                                               {model, "gate", "map_gate"},
                                               {model, "gru", "; without trained values: "},
                                               {model, "sla(9,9)", "sla(9,9)"},
                                               {model, "documents", "config.json names none (eos_token_id)"},
                                               {model, "share(", "share("}}) {
    const Outcome refused = run(sampler + folder + " --wiring '" + wiring + "' -n 1");
    EXPECT_EQ(refused.exit_status, 1) << wiring;
    EXPECT_NE(refused.err.find(missing), std::string::npos) << refused.err;
    EXPECT_EQ(refused.out, "");
  }
}

// A vocabulary that is named alone is looked at as well as one that is read with its model.
TEST_F(CheckpointFolder, ItsVocabularyIsReadIfItsChecksumFits) {
  const Outcome trained = run("build/fp32/train_gpt2_sla_cpu -i " + write("data.bin", shard_bytes(2000)) +
                              " --layers 1 --heads 1 --channels 8 --vocab-size 257 --max-seq-len 16 -t 16 -b 1 -x 1 -v "
                              "0 "
                              "--tokenizer bytes -o " +
                              in("run"));
  ASSERT_EQ(trained.exit_status, 0) << trained.err;
  const std::string checkpoint = in("run/step_00000001"), file = checkpoint + "/tokenizer.json";
  EXPECT_EQ(Tokenizer::load(checkpoint).vocab_size(), 257);
  std::string text = read_file(file);
  const size_t a = text.find("\"a\""), b = text.find("\"b\"");
  ASSERT_NE(std::max(a, b), std::string::npos);
  std::swap(text[a + 1], text[b + 1]);
  write_file(file, text);
  EXPECT_ERROR(Tokenizer::load(checkpoint), "tokenizer.json: is damaged: its checksum is");
  EXPECT_ERROR(Tokenizer::load(file), "tokenizer.json: is damaged: its checksum is");
  fs::remove(checkpoint + "/state.json");
  EXPECT_NO_THROW(Tokenizer::load(file)) << "a vocabulary like any other";
}

TEST_F(SmallFile, HasABoundedNumberOfBytes) {
  write("four", "1234");
  EXPECT_EQ(read_whole_file(in("four"), 4), "1234");
  EXPECT_ERROR(read_whole_file(in("four"), 3), "four: has more than 3 bytes");
  ASSERT_EQ(truncate(write("sparse", "").c_str(), off_t(1) << 40), 0);
  EXPECT_ERROR(read_whole_file(in("sparse")), "sparse: has more than 67108864 bytes");
  EXPECT_ERROR(read_whole_file("/dev/zero", 1000, FileKind::any), "/dev/zero: has more than 1000 bytes");
}

TEST_F(SmallFile, ThatIsAPointerOfGitLfsIsCalledSo) {
  const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 497774208\n";
  for (const char* name : {"config.json", "model.safetensors"}) write(name, pointer);
  EXPECT_ERROR(read_whole_file(in("config.json")), "config.json: is a Git LFS pointer");
  EXPECT_ERROR(SafetensorsFile(in("model.safetensors")), "model.safetensors: is a Git LFS pointer");
}

// ----------------------------------------------------------------------------
// Weights in another form

using WeightFiles = FolderTest;

TEST_F(WeightFiles, OfOtherFormatsAreNamed) {
  EXPECT_EQ(weight_files(folder), std::vector<std::string>{in("model.safetensors")});
  for (const char* name : {"pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5"}) {
    write(name, "weights");
    EXPECT_ERROR(weight_files(folder), std::string(name) + ": has the weights in another format");
    fs::remove(in(name));
  }
  write("pytorch_model.bin", "weights"), write("model.safetensors", "weights");
  EXPECT_EQ(weight_files(folder), std::vector<std::string>{in("model.safetensors")}) << "both are there";
}

TEST_F(WeightFiles, ThatAnIndexNamesMustAllBeThere) {
  write("model.safetensors.index.json", R"({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})");
  EXPECT_ERROR(weight_files(folder), "1.safetensors: is not there; ");
  write("1.safetensors", "weights");
  EXPECT_ERROR(weight_files(folder), "2.safetensors: is not there; ");
  write("2.safetensors", "weights");
  EXPECT_EQ(weight_files(folder), (std::vector<std::string>{in("1.safetensors"), in("2.safetensors")}));
}

// ----------------------------------------------------------------------------
// Programs

class Folders : public CommandLine {
 protected:
  // A copy of the model in the folder `name`, with a config.json that the change has been made to.
  std::string copy_of_model(const std::string& name, const json& changes = json::object()) const {
    fs::copy(model, in(name));
    json config = json::parse(read_file(model + "/config.json"));
    config.update(changes);
    write_file(in(name + "/config.json"), config.dump());
    return in(name);
  }
  // Expects the command to end at once, with an error that has `part`.
  void expect_refusal(const std::string& command, const std::string& part) const {
    const Outcome o = run("timeout -k 1 20 " + command);
    EXPECT_EQ(o.exit_status, 1) << command << "\n" << o.err;
    EXPECT_EQ(o.err.compare(0, 7, "error: "), 0) << command << "\n" << o.err;
    EXPECT_NE(o.err.find(part), std::string::npos) << command << "\n" << o.err;
  }
  // Every program that reads a model's folder.
  std::vector<std::string> readers_of(const std::string& name) const {
    return {sampler + name + " --prompt a -n 1",
            "build/fp32/evaluate_gpt2_sla_cpu " + name + " " + model + "/tokens.bin",
            convert + name + " " + in("never"), trainer + "-i " + model + "/tokens.bin -x 1 -e " + name};
  }
};
using LongFolders = Folders;

TEST_F(Folders, OfOtherModelTypesAreNamedWithWhatConvertsThem) {
  for (const std::string type : {"llama", "mistral"}) {
    const std::string name = in(type);
    fs::create_directory(name);
    write(type + "/config.json", json{{"model_type", type}, {"num_hidden_layers", 2}}.dump());
    for (const std::string& command : readers_of(name))
      if (type != "llama" || command.find(convert) == std::string::npos)
        expect_refusal(command, "model_type is \"" + type + "\"" +
                                    (type == "llama" ? "; convert it first: data/convert " + name : "; only gpt2"));
  }
}

TEST_F(Folders, OfARunStandForItsNewestCheckpoint) {
  fs::create_directories(in("run"));
  for (const char* step : {"run/step_00000002", "run/step_00000010"}) copy_of_model(step);
  fs::remove(in("run/step_00000002/config.json"));
  for (const std::string& command : readers_of(in("run"))) {
    const Outcome o = run(command + (begins_with(command, trainer) ? " -b 1 -t 8 -v 0" : ""));
    EXPECT_EQ(o.exit_status, 0) << command << o.err;
    EXPECT_NE(o.err.find(in("run") + ": is a run's folder; its newest checkpoint is " + in("run/step_00000010")),
              std::string::npos)
        << command << o.err;
  }
}

TEST_F(Folders, OfCompiledAndWrappedModelsAreRead) {
  const SafetensorsFile plain_file(model + "/model.safetensors");
  const std::string folder = copy_of_model("wrapped"), path = folder + "/model.safetensors";
  for (const char* prefix : {"_orig_mod.transformer.", "module._orig_mod.", "other."}) {
    std::vector<SafetensorsSpec> specs;
    for (const SafetensorsTensor& t : plain_file.tensors()) specs.push_back({prefix + t.name, t.shape});
    fs::remove(path);
    SafetensorsWriter writer(path, specs);
    for (size_t i = 0; i < specs.size(); i++) {
      std::vector<float> values(size_t(plain_file.tensors()[i].num_elements()));
      plain_file.read_f32(plain_file.tensors()[i], values.data());
      writer.write_f32(i, values.data(), 0, int64_t(values.size()));
    }
    writer.finish();
    const std::string command = "build/fp32/evaluate_gpt2_sla_cpu -q ", file = " " + model + "/tokens.bin";
    if (prefix == std::string("other.")) {
      expect_refusal(command + folder + file, "wte.weight is missing; one that is left is other.");
    } else {
      const std::string expected = run(command + model + file).out;
      EXPECT_NE(expected.find("tokens.bin"), std::string::npos);
      EXPECT_EQ(run(command + folder + file).out, expected) << prefix;
    }
  }
}

TEST_F(Folders, PipesAndDevicesInThemAreRefusedByEveryProgram) {
  const std::string folder_of_model = in("model");
  ASSERT_EQ(run(convert + model + " " + folder_of_model + " --tokenizer bytes").exit_status, 0);
  for (const char* name : {"config.json", "model.safetensors", "tokenizer.json"})
    for (bool is_pipe : {true, false}) {
      const std::string path = in("model/") + name, away = in("away");
      fs::rename(path, away);
      if (is_pipe) {
        ASSERT_EQ(mkfifo(path.c_str(), 0666), 0);
      } else fs::create_symlink("/dev/zero", path);
      for (const std::string& command : readers_of(folder_of_model)) expect_refusal(command, name);
      fs::remove(path), fs::rename(away, path);
    }
  fs::create_directory(in("run"));
  for (const char* name : {"log.jsonl", "config.toml", "positions.csv"}) {
    write("run/log.jsonl", "{\"run\":{}}\n");
    fs::remove(in("run/") + name);
    ASSERT_EQ(mkfifo((in("run/") + name).c_str(), 0666), 0);
    expect_refusal(report + in("run"), std::string(name) + ": is a pipe or a device");
    fs::remove(in("run/") + name);
  }
  ASSERT_EQ(mkfifo(in("pipe").c_str(), 0666), 0);
  for (const std::string& command :
       {trainer + "-x 1 --config " + in("pipe"), trainer + "-x 1 -i " + in("pipe"),
        sampler + model + " --tokenizer " + in("pipe"), report + "-o " + in("page") + " --outline " + in("pipe"),
        convert + in("pipe") + " " + in("never")})
    expect_refusal(command, "pipe: ");
}

TEST_F(Folders, ConfigsOfLargerModelsThanTheWeightsAreRefusedAtOnce) {
  int n = 0;
  for (const json& change :
       {json{{"n_layer", 16384}}, json{{"n_layer", 65536}}, json{{"n_layer", 9000}}, json{{"vocab_size", 1 << 24}},
        json{{"n_embd", 8192}}, json{{"n_positions", 1 << 22}}, json{{"n_layer", 9000}, {"wiring", "universal(1)"}},
        json{{"n_layer", 9000}, {"wiring", "gate"}}, json{{"n_head", 1 << 20}}}) {
    const std::string name = copy_of_model(std::to_string(n++), change);
    for (const std::string& command : {sampler + name + " --prompt a -n 1", convert + name + " " + in("never")})
      expect_refusal(command, name);
  }
}

// The sampler waits for a prompt before it loads the model.
TEST_F(Folders, ASignalWhileAModelIsLoadedEndsTheProgram) {
  ASSERT_EQ(mkfifo(in("pipe").c_str(), 0666), 0);
  for (int signal : {SIGTERM, SIGINT}) {
    const std::string command = alone + sampler + model + " --prompt-file " + in("pipe") + " >/dev/null 2>&1";
    const int status = run_and_signal("timeout -s KILL 10 " + command, signal, 700000);
    const int ended_by = WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status) - 128;
    EXPECT_EQ(ended_by, signal) << "not by a second one, or when the time was over";
  }
}

TEST_F(Folders, ASignalEndsATokenizerThatWaitsForText) {
  ASSERT_EQ(mkfifo(in("pipe").c_str(), 0666), 0);
  const std::string command =
      "data/tokenize --tokenizer bytes --out " + in("tokens") + " - <>" + in("pipe") + " 2>" + in("error");
  const int status = run_and_signal("timeout -s KILL 10 " + command, SIGTERM, 1500000);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1) << status;
  EXPECT_NE(read_file(in("error")).find("error: "), std::string::npos);
  run_and_signal("timeout -s KILL 2 nohup " + command, SIGHUP, 1000000);
  EXPECT_EQ(read_file(in("error")).find("error: "), std::string::npos) << "nohup ignores it";
  EXPECT_FALSE(fs::exists(in("tokens")));
}

// A byte of a checkpoint is another one, and the file is still valid. All that read it as a model say which it is.
TEST_F(LongFolders, ADamagedCheckpointIsRefusedByEveryProgram) {
  write("tokens.bin", shard_bytes(3000));
  const Outcome trained =
      run(alone + trainer + small_model + "--tokenizer bytes -x 1 -v 0 -i " + in("tokens.bin") + " -o " + in("run"));
  ASSERT_EQ(trained.exit_status, 0) << trained.err;
  const std::string checkpoint = in("run/step_00000001");
  auto change = [&](const std::string& name, const std::string& from, const std::string& to) {
    std::string bytes = read_file(checkpoint + "/" + name);
    const size_t at = from.empty() ? bytes.size() - 2 : bytes.find(from);
    ASSERT_NE(at, std::string::npos) << name;
    const std::string whole = bytes;
    if (from.empty()) bytes[at] = char(bytes[at] ^ 1);
    else bytes.replace(at, from.size(), to);
    write_file(checkpoint + "/" + name, bytes);
    for (const std::string& command : readers_of(checkpoint)) expect_refusal(command, name + ": ");
    write_file(checkpoint + "/" + name, whole);
  };
  for (const std::string& command : readers_of(checkpoint)) EXPECT_EQ(run(command).exit_status, 0) << command;
  fs::remove_all(in("never"));
  change("model.safetensors", "", "");
  change("config.json", "1e-05", "1e-06");
  change("tokenizer.json", "}", "} ");
  change("state.json", "\"step\": 1", "\"step\": 2");
  fs::remove(checkpoint + "/optimizer.safetensors");  // which a model does not need
  for (const std::string& command : readers_of(checkpoint)) EXPECT_EQ(run(command).exit_status, 0) << command;
  fs::remove_all(in("never"));
  fs::remove(checkpoint + "/state.json");
  std::string bytes = read_file(checkpoint + "/config.json");
  bytes.replace(bytes.find("1e-05"), 5, "1e-06");
  write_file(checkpoint + "/config.json", bytes);
  for (const std::string& command : readers_of(checkpoint))
    EXPECT_EQ(run(command).exit_status, 0) << "without state.json it is a model like any other: " << command;
}

// The first steps' memory of earlier segments is empty, or small beside the longest.
TEST_F(Folders, StepsWithMemoryCountWhatTheyAttendTo) {
  write("tokens.bin", shard_bytes(4000));
  auto flops_of = [&](const std::string& wiring, const std::string& key) {
    const std::string out = in(wiring.substr(0, wiring.find('(')));
    const Outcome o = run(alone + trainer + small_model + "--wiring '" + wiring + "' -x 3 -v 0 -n 0 -i " +
                          in("tokens.bin") + " -o " + out);
    EXPECT_EQ(o.exit_status, 0) << o.err;
    std::vector<double> flops;
    for (const json& line : read_log(out)) {
      if (line.contains("run")) flops.push_back(line["run"].at("flops_per_token"));
      if (line.contains("loss") && line.contains(key)) flops.push_back(line.at(key));
    }
    fs::remove_all(out);
    return flops;
  };
  const std::vector<double> plain = flops_of("rope", "flops_per_token"), memory = flops_of("memory(1000) rope", "flops_"
                                                                                                                "per_"
                                                                                                                "toke"
                                                                                                                "n");
  ASSERT_EQ(plain.size(), 1u);
  ASSERT_EQ(memory.size(), 4u);
  EXPECT_EQ(memory[1], plain[0]) << "the first segment of a stream";
  EXPECT_GT(memory[2], memory[1]);
  EXPECT_NEAR(memory[3] - memory[2], memory[2] - memory[1], 1e-3) << "another 32 positions";
  EXPECT_NEAR(memory[0], (memory[1] + memory[2] + memory[3]) / 3, 1e-3) << "the run's is the mean";
}

// ----------------------------------------------------------------------------
// Control groups

class ControlGroups : public FolderTest {
 protected:
  std::string group(const std::string& path, const std::string& name, const std::string& text) const {
    fs::create_directories(in(path));
    return write(path + "/" + name, text);
  }
  double memory() const { return cgroup_memory_free(in("membership"), folder); }
  double processors() const { return processors_allowed(in("membership"), folder); }
};

// v2, as in a container, /pod/job: the job may have 900 bytes; 300 are in use, and 100 of these can be
// dropped; the pod may have less.
TEST_F(ControlGroups, OfV2LimitMemory) {
  write("membership", "0::/pod/job\n");
  EXPECT_TRUE(std::isinf(memory()));
  group("pod/job", "memory.max", "900\n"), group("pod/job", "memory.current", "300\n");
  EXPECT_EQ(memory(), 600);
  group("pod/job", "memory.stat", "anon 200\nfile 100\ninactive_file 60\nactive_file 40\n");
  EXPECT_EQ(memory(), 700);
  group("pod", "memory.max", "max\n"), group("pod", "memory.current", "800\n");
  EXPECT_EQ(memory(), 700);
  group("pod", "memory.max", "1000\n");
  EXPECT_EQ(memory(), 200);
  group("pod", "memory.high", "900\n");
  EXPECT_EQ(memory(), 100);
  group("pod", "memory.max", "500\n");
  EXPECT_EQ(memory(), 0) << "more is in use than is allowed";
  EXPECT_TRUE(std::isinf(cgroup_memory_free(in("nothing"), folder)));
}

// In v1 controllers have folders of their own, and in a container the path may be the host's.
TEST_F(ControlGroups, OfV1LimitMemoryAndProcessors) {
  write("membership", "9:name=systemd:/\n4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n");
  EXPECT_TRUE(std::isinf(memory()));
  EXPECT_TRUE(std::isinf(processors()));
  group("memory/docker/abc", "memory.limit_in_bytes", "1000\n");
  group("memory/docker/abc", "memory.usage_in_bytes", "700\n");
  group("memory/docker/abc", "memory.stat", "inactive_file 1\ntotal_inactive_file 50\ntotal_active_file 50\n");
  EXPECT_EQ(memory(), 400);
  fs::remove_all(in("memory/docker"));
  group("memory", "memory.limit_in_bytes", "900\n"), group("memory", "memory.usage_in_bytes", "100\n");
  EXPECT_EQ(memory(), 800) << "the container's own, at the mount";
  group("cpu,cpuacct/docker/abc", "cpu.cfs_quota_us", "150000\n");
  group("cpu,cpuacct/docker/abc", "cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(processors(), 1.5);
  group("cpu,cpuacct", "cpu.cfs_quota_us", "-1\n"), group("cpu,cpuacct", "cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(processors(), 1.5);
  group("cpu/docker", "cpu.cfs_quota_us", "50000\n"), group("cpu/docker", "cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(processors(), 0.5) << "the mount can have the name of one controller alone";
}

TEST_F(ControlGroups, LeaveNoMoreThanTheMachineHas) {
  EXPECT_GT(host_memory_available(), 0u);
  EXPECT_LE(double(host_memory_available()), double(meminfo_bytes("MemTotal")));
  write("membership", "0::/\n");
  group("", "memory.max", "4096\n"), group("", "memory.current", "96\n");
  EXPECT_EQ(host_memory_available(in("membership"), folder), 4000u);
}
