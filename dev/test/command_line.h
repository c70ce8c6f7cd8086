// Tests of programs as users run them: a process with arguments, files and an exit status. They run from the
// repository's root, where build/fp32/train_gpt2_sla_cpu lies.
#pragma once
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>
#include "llmc/base/crc32c.h"
#include "files.h"

namespace fs = std::filesystem;
using nlohmann::json;

static const std::string trainer = "build/fp32/train_gpt2_sla_cpu ";
static const std::string bf16_trainer = "build/bf16/train_gpt2_sla_cpu ";
// Threads that wait for each other are slow where other programs run too.
static const std::string alone = "env OMP_NUM_THREADS=1 ";
static const char small_model[] = " --layers 4 --heads 4 --channels 32 --vocab-size 257 --max-seq-len 32 -t 32 -b 2 -l "
                                  "1e-3 ";

struct Outcome {
  int exit_status;       // -1: killed by a signal
  std::string out, err;  // stdout, stderr
};

// The lines of a run's log.jsonl.
inline std::vector<json> read_log(const std::string& out) {
  std::vector<json> lines;
  std::ifstream file(out + "/log.jsonl");
  for (std::string line; std::getline(file, line);) lines.push_back(json::parse(line));
  return lines;
}

// The log's lines of training steps, without times and speeds.
inline std::vector<json> steps_of(const std::vector<json>& log) {
  std::vector<json> steps;
  for (json line : log) {
    if (!line.contains("loss")) continue;
    line.erase("ms");
    line.erase("data_ms");
    line.erase("limit_ms");
    line.erase("tokens_per_second");
    steps.push_back(line);
  }
  return steps;
}

// The steps whose checkpoint has a line in the log; one that has two lines is there twice.
inline std::multiset<int64_t> logged_checkpoints(const std::vector<json>& log) {
  std::multiset<int64_t> steps;
  for (const json& line : log)
    if (line.contains("checkpoint")) steps.insert(line.at("step").get<int64_t>());
  return steps;
}

// Expects the checkpoints of step `step` in two output folders to have the same bytes.
inline void expect_the_same_checkpoint(const std::string& a, const std::string& b, int64_t step) {
  char name[32];
  snprintf(name, sizeof name, "/step_%08lld", (long long)step);
  const std::set<std::string> names = names_in(a + name);
  EXPECT_EQ(names, names_in(b + name)) << a << " and " << b;
  for (const char* file : {"config.json", "model.safetensors", "optimizer.safetensors", "state.json"})
    EXPECT_TRUE(names.count(file)) << a << name << "/" << file;
  for (const std::string& file : names)
    EXPECT_TRUE(read_file(a + name + "/" + file) == read_file(b + name + "/" + file))
        << file << " of " << a << " and " << b;
}

// Writes a checkpoint's state.json from the text of its object, less the checksum and the "\n}" at the end.
inline void write_state(const std::string& path, const std::string& body) {
  write_file(path, body + ",\n \"checksum\": \"" + crc32c_hex(crc32c(body.data(), body.size())) + "\"\n}\n");
}

// Runs programs; each test has a folder of its own.
class CommandLine : public FolderTest {
 protected:
  // Runs a shell command, with an empty stdin.
  Outcome run(const std::string& command) const {
    int status = system(("{ " + command + "\n} >'" + in("stdout") + "' 2>'" + in("stderr") + "' </dev/null").c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(in("stdout")), read_file(in("stderr"))};
  }
  // The page that `report` makes of the run in this folder.
  std::string page_of(const std::string& out) const {
    const Outcome o = run("./report '" + out + "'");
    EXPECT_EQ(o.exit_status, 0) << o.err;
    return read_file(out + "/report.html");
  }
  // Resumes the run of `command` in the folder "out" to step `last`, and expects the bits of a run without an
  // interruption.
  void expect_the_end_of_an_undisturbed_run(const std::string& command, int64_t last) const {
    const std::string to_the_end = command + "-x " + std::to_string(last);
    ASSERT_EQ(run(to_the_end + " -y -o " + in("out")).exit_status, 0);
    ASSERT_EQ(run(to_the_end + " -o " + in("undisturbed")).exit_status, 0);
    expect_the_same_checkpoint(in("out"), in("undisturbed"), last);
    EXPECT_EQ(steps_of(read_log(in("out"))), steps_of(read_log(in("undisturbed"))));
  }
  // Runs the trainer, and expects exit status 1, one line of error that contains each of `parts`, and no output folder.
  void expect_error(const std::string& arguments, const std::vector<std::string>& parts) const {
    const Outcome o = run(trainer + arguments + " -o " + in("never"));
    EXPECT_EQ(o.exit_status, 1) << arguments;
    EXPECT_EQ(o.err.compare(0, 7, "error: "), 0) << o.err;
    EXPECT_EQ(o.err.find('\n'), o.err.size() - 1) << o.err;
    for (const std::string& part : parts) EXPECT_NE(o.err.find(part), std::string::npos) << part << "\n" << o.err;
    EXPECT_FALSE(fs::exists(in("never"))) << arguments;
  }
};
using LongCommandLine = CommandLine;  // for the tests that `make test` leaves out

// Sets the environment for mpirun: it may run as root, with one thread a process, and does not read other processes'
// memory, which a container may forbid.
inline void allow_mpirun() {
  for (const char* name : {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMP_NUM_THREADS"})
    setenv(name, "1", 1);
  setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 1);
}

// Until its end TMPDIR is a folder in `folder`, where ranks that are killed leave files.
struct TemporaryFiles {
  explicit TemporaryFiles(const std::string& folder) {
    fs::create_directory(folder + "/temporary");
    setenv("TMPDIR", (folder + "/temporary").c_str(), 1);
  }
  ~TemporaryFiles() { before.empty() ? unsetenv("TMPDIR") : setenv("TMPDIR", before.c_str(), 1); }
  const std::string before = getenv("TMPDIR") != nullptr ? getenv("TMPDIR") : "";
};

// The bytes of a shard of n tokens, 0 to `largest`, in a pattern that a small model learns.
inline std::string shard_bytes(int n, uint16_t largest = 255) {
  int32_t header[256] = {20240520, 1, n};
  std::string bytes(reinterpret_cast<char*>(header), sizeof header);
  for (int i = 0; i < n; i++) {
    uint16_t token = uint16_t((i * i / 7 + i % 5) % (largest + 1));
    bytes.append(reinterpret_cast<char*>(&token), 2);
  }
  return bytes;
}

// As shard_bytes, with documents that begin with an end of text, token 256, and have 1 to 17 tokens, and `more`.
inline std::string shard_of_documents(int n, uint16_t largest = 255, int more = 0) {
  std::string bytes = shard_bytes(n, largest);
  for (int i = 0; i < n; i += 1 + more + i * 7 % 17) memcpy(&bytes[size_t(1024 + 2 * i)], "\0\1", 2);
  return bytes;
}

// The mask of a shard's bytes: token i is scored if is_scored(i).
template <class IsScored>
std::string mask_of_shard(const std::string& shard, IsScored is_scored) {
  const std::string tokens = shard.substr(256 * sizeof(int32_t));
  const int count = int(tokens.size() / 2);
  int32_t header[256] = {20261124, 1, count, int32_t(crc32c(tokens.data(), tokens.size()))};
  std::string bytes(reinterpret_cast<char*>(header), sizeof header);
  bytes.resize(sizeof header + size_t(count + 7) / 8);
  for (int i = 0; i < count; i++)
    if (is_scored(i)) bytes[sizeof header + size_t(i / 8)] |= char(1 << i % 8);
  return bytes;
}
