// The CPU's programs on Arm, under qemu: dev/arm64_check.sh, which says what it needs. Without that, the test is
// skipped.
// COVERS ONLY llmc/base/crc32c.h
#include "command_line.h"

using LongArm64 = CommandLine;

TEST_F(LongArm64, HasTheLossesOfGoldenCases) {
  const Outcome o = run("dev/arm64_check.sh");
  if (o.exit_status == 77) GTEST_SKIP() << o.err;
  EXPECT_EQ(o.exit_status, 0) << o.out << o.err;
  for (const char* name : {"paper_default", "f_reformer", "f_gtrxl"})
    EXPECT_NE(o.out.find(std::string(name) + ": 10 losses, at most "), std::string::npos) << o.out << o.err;
}
