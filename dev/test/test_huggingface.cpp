// Models in transformers and llama.cpp: dev/huggingface_check.py and dev/llama_cpp_check.py, in virtual environments of
// Python that dev/transformers_venv.sh makes in build/huggingface. Without a network, and where Python has no virtual
// environments, the tests are skipped.
// COVERS ONLY llmc/formats/huggingface/ llmc/formats/gguf_file.cpp llmc/formats/llama_file.cpp
#include "command_line.h"

namespace {

struct LongHuggingFace : CommandLine {
  // Runs a script with this version of transformers, and expects it to say something.
  void expect_to_pass(const std::string& version, const std::string& script, const std::string& said) {
    const Outcome made = run("dev/transformers_venv.sh build/huggingface " + version);
    if (made.exit_status == 77) GTEST_SKIP() << made.err;
    ASSERT_EQ(made.exit_status, 0) << made.err;
    const std::string python = made.out.substr(0, made.out.find('\n'));
    const Outcome checked = run(alone + python + " " + script);
    EXPECT_EQ(checked.exit_status, 0) << checked.out << checked.err;
    EXPECT_NE(checked.out.find(said), std::string::npos) << checked.out;
  }
};

TEST_F(LongHuggingFace, ModelsAreTheSameInTheNewestTransformers) {
  expect_to_pass("newest", "dev/huggingface_check.py", " cases are the same with transformers ");
}

// In 2024 generate() had other names for what it hands to a model, and other classes of caches.
TEST_F(LongHuggingFace, ModelsAreTheSameInTransformersOf2024) {
  expect_to_pass("4.46.3", "dev/huggingface_check.py", " cases are the same with transformers 4.46.3");
}

TEST_F(LongHuggingFace, FilesForLlamaCppAreReadByItsOwnReader) {
  expect_to_pass("newest", "dev/llama_cpp_check.py", "llama_2_tied: the same");
}

}  // namespace
