// Models in transformers: dev/huggingface_check.py, in virtual environments of Python that dev/transformers_venv.sh
// makes in build/huggingface. Without a network, and where Python has no virtual environments, the tests are skipped.
// COVERS ONLY llmc/model/huggingface/
#include "command_line.h"

namespace {

struct LongHuggingFace : CommandLine {
  void expect_all_cases_the_same(const std::string& version) {
    const Outcome made = run("dev/transformers_venv.sh build/huggingface " + version);
    if (made.exit_status == 77) GTEST_SKIP() << made.err;
    ASSERT_EQ(made.exit_status, 0) << made.err;
    const std::string python = made.out.substr(0, made.out.find('\n'));
    const Outcome checked = run(alone + python + " dev/huggingface_check.py");
    EXPECT_EQ(checked.exit_status, 0) << checked.out << checked.err;
    EXPECT_NE(checked.out.find(" cases are the same with transformers " + (version == "newest" ? "" : version)),
              std::string::npos)
        << checked.out;
  }
};

TEST_F(LongHuggingFace, ModelsAreTheSameInTheNewestTransformers) { expect_all_cases_the_same("newest"); }

// Of 2024: generate() has other names for what it hands to a model, and other classes of caches.
TEST_F(LongHuggingFace, ModelsAreTheSameInTransformersOf2024) { expect_all_cases_the_same("4.46.3"); }

}  // namespace
