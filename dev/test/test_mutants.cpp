// dev/test/mutants.cpp: which mutants it derives from a piece of source, and that one that no test notices is reported.
#include <gtest/gtest.h>
#include <algorithm>
#include <string>
#include <vector>
#include "command_line.h"
#include "dev/test/mutants/bugs.h"
#include "dev/test/mutants/derive.h"
#include "helpers.h"
#include "llmc/base/clock.h"

using mutants::Mutant;

// Each mutant as "kind: source with it", for a function's body on one line.
static std::vector<std::string> mutants_of(const std::string& body) {
  const std::string head = "void f() { ", source = head + body + " }";
  std::vector<std::string> all;
  for (const Mutant& m : mutants::derive_mutants(source)) {
    const std::string mutated = source.substr(0, m.begin) + m.text + source.substr(m.end);
    all.push_back(m.kind + (": " + mutated.substr(head.size(), mutated.size() - head.size() - 2)));
  }
  return all;
}

using Texts = std::vector<std::string>;

TEST(Mutants, OfStatementsDropEachOfThem) {
  EXPECT_EQ(mutants_of("g(); x.y++;"), Texts({"statement: ; x.y++;", "statement: g(); ;"}));
  EXPECT_EQ(mutants_of("if (a) g(), h();"),
            Texts({"condition: if (!(a)) g(), h();", "statement: if (a)  h();", "statement: if (a) g();"}));
  EXPECT_EQ(mutants_of("for (int i : all) continue;"), Texts({"statement: for (int i : all) ;"}));
}

TEST(Mutants, OfBarriersWaitsAndEventsAreNamedSo) {
  for (const char* call : {"__syncthreads();", "__syncwarp();", "wait_for_copies();", "c.compute_waits_for_comm();",
                           "CUDA_CHECK(0), cudaEventRecord(e, s);", "cudaStreamWaitEvent(s, e, f);"})
    EXPECT_EQ(mutants_of(call).back().substr(0, 17), "synchronization: ") << call;
  EXPECT_EQ(mutants_of("load_tile_async(x);"), Texts({"statement: ;"}));
}

TEST(Mutants, OfDeclarationsDropNothing) {
  EXPECT_EQ(mutants_of("int x(y); std::vector<int> v = w; const T *p = q; Tile<D> t{u}; T* r; using namespace a; "
                       "return x;"),
            Texts());
}

TEST(Mutants, OfAssignmentsSetForAddAndAddForSet) {
  EXPECT_EQ(mutants_of("x += y;"), Texts({"statement: ;", "assignment: x = y;"}));
  EXPECT_EQ(mutants_of("x[i] = y;"), Texts({"statement: ;", "assignment: x[i] += y;"}));
  EXPECT_EQ(mutants_of("p = nullptr;"), Texts({"statement: ;"}));
}

TEST(Mutants, OfConditionsNegateThem) {
  EXPECT_EQ(mutants_of("while (a) break;"), Texts({"condition: while (!(a)) break;"}));
  EXPECT_EQ(mutants_of("for (int i; a; b) break;"), Texts({"condition: for (int i; !(a); b) break;"}));
  EXPECT_EQ(mutants_of("if constexpr (int x; a) break;"), Texts({"condition: if constexpr (int x; !(a)) break;"}));
  EXPECT_EQ(mutants_of("return a(b) ? c : d;"), Texts({"condition: return !(a(b)) ? c : d;"}));
}

TEST(Mutants, OfOperatorsAreTheirNeighbours) {
  EXPECT_EQ(mutants_of("return a < b;"), Texts({"comparison: return a <= b;"}));
  EXPECT_EQ(mutants_of("return a >= b;"), Texts({"comparison: return a > b;"}));
  EXPECT_EQ(mutants_of("return a == b;"), Texts({"comparison: return a != b;"}));
  EXPECT_EQ(mutants_of("return a && b;"), Texts({"logic: return a || b;"}));
  EXPECT_EQ(mutants_of("return a + b;"), Texts({"sign: return a - b;"}));
  EXPECT_EQ(mutants_of("return a - -b;"), Texts({"sign: return a + -b;"}));
}

TEST(Mutants, OfConstantsAreOneMore) {
  EXPECT_EQ(mutants_of("return 16;"), Texts({"constant: return 17;"}));
  EXPECT_EQ(mutants_of("return 0xffu;"), Texts({"constant: return 256u;"}));
  EXPECT_EQ(mutants_of("float x[8]; return 1.5e-3f;"), Texts());
}

TEST(Mutants, OfArgumentsSwapNeighboursOfOneType) {
  const std::string declared = "int a, b; float c; ";
  EXPECT_EQ(mutants_of(declared + "return g(a, b, c);"), Texts({"arguments: " + declared + "return g(b, a, c);"}));
  EXPECT_EQ(mutants_of("return g(p.x[i], p.y[i]);"), Texts({"arguments: return g(p.y[i], p.x[i]);"}));
  EXPECT_EQ(mutants_of(declared + "return max(a, b);"), Texts());
}

TEST(Mutants, LeaveTextCommentsDirectivesTemplatesAndInvariantsAlone) {
  EXPECT_EQ(mutants_of("return \"a + 1 \\\" < 2\"; // 1 + 2\n /* 1 + 2 */ "), Texts());
  EXPECT_EQ(mutants_of("return x;\n#if 1 + 2 > \\\n 4\n#endif\n"), Texts());
  EXPECT_EQ(mutants_of("return R\"(1 + 2)\";"), Texts());
  EXPECT_EQ(mutants_of("using A = B<C<D>>; CHECK(a < 2 && b);"), Texts());
  EXPECT_EQ(mutants::derive_mutants("template <class T, int D> struct X { static constexpr bool a = b<T> && D; };")
                .size(),
            1u);
}

TEST(Mutants, FindStatementsInLambdasButNotInTypesAndInitialisers) {
  const Texts all = mutants_of("auto f = [&](int i) { g(i); };");
  EXPECT_EQ(all, Texts({"statement: auto f = [&](int i) { ; };"}));
  EXPECT_EQ(mutants::derive_mutants("struct X { X(); ~X(); int f() const; }; int a[] = {g(), h()};").size(), 0u);
}

TEST(Mutants, KeepTheNumberOfLines) {
  const std::string source = "void f() {\n  g(a,\n    b);\n  h();\n}\n";
  for (const Mutant& m : mutants::derive_mutants(source)) {
    const std::string mutated = source.substr(0, m.begin) + m.text + source.substr(m.end);
    EXPECT_EQ(std::count(mutated.begin(), mutated.end(), '\n'), 5) << mutated;
  }
}

TEST(WrittenBugs, BelongToTheTestAboveThem) {
  const auto bugs = mutants::collect_bugs("dev/test/bugs/test_x.txt", "TEST(Suite, Name)\na.h: `x < y` -> `x > y`\n\n"
                                                                      "TEST_P(Cases, Other)\n(build/fp32/test_x_emu) "
                                                                      "b.h: `f(\"->\")` -> `g()`\n");
  ASSERT_EQ(bugs.size(), 2u);
  EXPECT_EQ(bugs[0].file + "|" + bugs[0].from + "|" + bugs[0].to + "|" + bugs[0].program + "|" + bugs[0].filter,
            "a.h|x < y|x > y|build/test_x|Suite.Name");
  EXPECT_EQ(bugs[1].file + "|" + bugs[1].from + "|" + bugs[1].to + "|" + bugs[1].program + "|" + bugs[1].filter,
            "b.h|f(\"->\")|g()|build/fp32/test_x_emu|*/Cases.Other/*");
  const std::string on_emu = "TEST(LONG_ON_EMU(Suite), Name)\na.h: `x` -> `y`\n";
  EXPECT_EQ(mutants::collect_bugs("t.txt", on_emu)[0].filter, "*Suite.Name");
  EXPECT_ERROR(mutants::locate_bug(bugs[0], "x < z"), "a.h does not hold `x < y`");
  EXPECT_ERROR(mutants::locate_bug(bugs[0], "x < y; x < y"), "more than once");
  EXPECT_EQ(mutants::locate_bug(bugs[0], "if (x < y)").begin, 4u);
  EXPECT_ERROR(mutants::collect_bugs("t.txt", "TEST(A, B)\na.h: x to y\n"), "t.txt:2: is no bug");
  EXPECT_ERROR(mutants::collect_bugs("t.txt", "a.h: `x` -> `y`\n"), "no test stands above");
}

TEST(WrittenBugs, NameTestsOfTheirFileAndTextThatStandsThere) {
  int bugs = 0;
  for (const auto& file : fs::recursive_directory_iterator("dev/test/bugs")) {
    if (!file.is_regular_file()) continue;
    const std::string name = file.path().lexically_relative("dev/test/bugs").replace_extension();
    std::string source;  // of the tests
    for (const char* extension : {".cpp", ".cu", ".h"})
      for (const std::string& folder : {std::string("dev/test/"), std::string()})
        if (fs::exists(folder + name + extension)) source += read_file(folder + name + extension);
    std::istringstream lines(read_file(file.path()));
    for (std::string line; std::getline(lines, line);)
      if (line.compare(0, 4, "TEST") == 0) { EXPECT_NE(source.find("\n" + line + " {"), std::string::npos) << line; }
    for (const auto& bug : mutants::collect_bugs(file.path(), read_file(file.path()))) {
      EXPECT_NO_THROW(mutants::locate_bug(bug, read_file(bug.file))) << bug.where;
      bugs++;
    }
  }
  EXPECT_GT(bugs, 500);
}

// A project of one header, one test and a Makefile, in a repository of its own.
class SmallProject : public CommandLine {
 protected:
  void SetUp() override {
    program = fs::absolute("build/mutants");
    write_file(in("half.h"), "inline int half(int x) {\n  int y = x;\n  y /= 2;\n  return y;\n}\n");
    write_file(in("Makefile"), "build/%: %.cpp half.h\n\t@mkdir -p build; $(CXX) $< -o $@\n"
                               "list-tests:\n\t@cat tests.txt\n");
    write_file(in("tests.txt"), "\n\n\n");
    write_file(in("checks.cpp"), "#include \"half.h\"\nint main() { return half(8) == 4 ? 0 : 1; }\n");
    write_file(in("checks_nothing.cpp"), "#include \"half.h\"\nint main() { half(8); return 0; }\n");
    write_file(in("fails.cpp"), "#include \"half.h\"\nint main() { return 1; }\n");
    ASSERT_EQ(run("cd '" + folder + "' && git init -q && echo build >.gitignore").exit_status, 0);
  }
  Outcome mutate(const std::string& arguments) const {
    return run("cd '" + folder + "' && unset TMPDIR && mkdir -p tmp && TMPDIR=$PWD/tmp '" + program + "' " + arguments);
  }
  std::string program;
};

TEST_F(SmallProject, AMutantThatATestNoticesIsKilled) {
  const Outcome o = mutate("half.h --test checks");
  EXPECT_EQ(o.exit_status, 0) << o.out << o.err;
  EXPECT_NE(o.out.find("3 mutants of 3: 3 killed, 0 survived"), std::string::npos) << o.out;
}

TEST_F(SmallProject, AMutantThatNoTestNoticesIsASurvivor) {
  const Outcome o = mutate("half.h --test checks_nothing -j 2");
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.out.find("3 mutants of 3: 0 killed, 3 survived"), std::string::npos) << o.out << o.err;
  EXPECT_NE(o.out.find("half.h:3 (assignment)\n- y /= 2;\n+ y = 2;\n"), std::string::npos) << o.out;
}

TEST_F(SmallProject, AKnownEquivalentMutantIsNoSurvivor) {
  const std::string entry = "half.h\n- y /= 2;\n+ y = 2;\nThe test asks for nothing.\n";
  write_file(in("known.txt"), "# comment\n" + entry);
  const Outcome o = mutate("half.h --test checks_nothing --only assignment --equivalent known.txt");
  EXPECT_EQ(o.exit_status, 0) << o.out << o.err;
  EXPECT_NE(o.out.find("1 mutants of 1: 0 killed, 0 survived, 1 known"), std::string::npos) << o.out;
  write_file(in("known.txt"), "half.h\n- y /= 4;\n+ y = 4;\nIt was once.\n");
  EXPECT_NE(mutate("half.h --test checks --equivalent known.txt").out.find("no longer a mutant"), std::string::npos);
  write_file(in("known.txt"), "half.h\n- y /= 2;\n");
  EXPECT_NE(mutate("half.h --test checks --equivalent known.txt").err.find("error: known.txt:3: "), std::string::npos);
}

TEST_F(SmallProject, NoCompilationOrTheSameProgramIsNoKill) {
  write_file(in("half.h"), "inline int half(int x) {\n#ifdef NEVER\n  g();\n#endif\n  const int y[] = {x, 2};\n  "
                           "return y[0] / y[1];\n}\n");
  write_file(in("checks.cpp"), "#include \"half.h\"\nint main() { static_assert(sizeof half(8) == 4); return half(8) "
                               "== 4 ? 0 : 1; }\n");
  const Outcome same = mutate("half.h --test checks --only statement");
  EXPECT_NE(same.out.find("the same program: half.h:3 (statement)"), std::string::npos) << same.out << same.err;
  EXPECT_NE(same.out.find("1 mutants of 1: 0 killed, 0 survived, 0 known to change nothing, 1 that"), std::string::npos)
      << same.out;
  write_file(in("half.h"), "inline int half(int x) {\n  const int* y = &x;\n  return *(0 + y) / 2;\n}\n");
  const Outcome broken = mutate("half.h --test checks --only sign");
  EXPECT_NE(broken.out.find("did not compile: half.h:3 (sign)"), std::string::npos) << broken.out << broken.err;
}

TEST_F(SmallProject, ABugOfAScriptIsTriedThoughNoProgramChanges) {
  fs::create_directories(in("dev/test/bugs"));
  write_file(in("dev/test/bugs/test_step.txt"), "TEST(Step, Ends)\nstep.sh: `exit 0` -> `exit 1`\n");
  write_file(in("Makefile"), "build/%: dev/test/%.cpp\n\t@mkdir -p build; $(CXX) $< -o $@\n"
                             "list-tests:\n\t@cat tests.txt\n");
  write_file(in("tests.txt"), "build/test_step\n\n\n");
  write_file(in("step.sh"), "exit 0\n");
  write_file(in("dev/test/test_step.cpp"), "#include <cstdlib>\n"
                                           "int main() { return system(\"sh step.sh\") == 0 ? 0 : 1; }\n");
  const Outcome o = mutate("--bugs");
  EXPECT_EQ(o.exit_status, 0) << o.out << o.err;
  EXPECT_NE(o.out.find("1 mutants of 1: 1 killed, 0 survived"), std::string::npos) << o.out << o.err;
}

TEST_F(SmallProject, ASampleIsDrawnBySeedAndListedOnly) {
  const Outcome all = mutate("half.h --test checks --list"), one = mutate("half.h --test checks --list --sample 1 "
                                                                          "--seed 3");
  EXPECT_NE(all.out.find("3 mutants of 3\n"), std::string::npos) << all.out << all.err;
  EXPECT_NE(one.out.find("1 mutants of 3\n"), std::string::npos) << one.out;
  EXPECT_EQ(one.out, mutate("half.h --test checks --list --sample 1 --seed 3").out);
  EXPECT_FALSE(fs::exists(in("build")));
}

TEST_F(SmallProject, ChangedFilesAreThoseThatDifferFromACommit) {
  const std::string git = "cd '" + folder + "' && git -c user.name=a -c user.email=a@b.c ";
  write_file(in("train_gpt2_sla.cu"), "int x = 1;\n");
  write_file(in("test_covering.cpp"), "#include \"train_gpt2_sla.cu\"\n");
  write_file(in("tests.txt"), "build/test_covering\n\n\n");
  ASSERT_EQ(run(git + "add . && " + git + "commit -qm first").exit_status, 0);
  EXPECT_NE(mutate("--changed HEAD --list").err.find("error: no mutants"), std::string::npos);
  write_file(in("train_gpt2_sla.cu"), "int x = 2;\n");
  write_file(in("half.h"), "int half(int x) { return x / 2; }\n");
  const Outcome o = mutate("--changed HEAD --list");
  EXPECT_NE(o.out.find("no test covers it: half.h\n"), std::string::npos) << o.out << o.err;
  EXPECT_NE(o.out.find("train_gpt2_sla.cu:1 (constant)\n- int x = 2;\n+ int x = 3;\n"), std::string::npos) << o.out;
  EXPECT_NE(mutate("--changed nowhere --list").err.find("error: git "), std::string::npos);
}

// The order in which the test programs of a header are tried: the one of its name, then the smaller one; the CPU's
// before the emulated GPU's, which is only tried where the source differs; then those that say that they cover the
// header. A test that only runs a program with the header comes last.
TEST_F(SmallProject, TestsAreThoseOfTheProgramsThatIncludeAFile) {
  fs::create_directories(in("dev/test"));
  const auto tests_of = [&](const std::string& file) {
    const Outcome o = mutate("--list " + file);
    std::istringstream lines(o.out);
    std::string tests, line;
    std::getline(lines, line);
    EXPECT_EQ(line, file + " is tried by") << o.out << o.err;
    while (std::getline(lines, line) && line.compare(0, 8, "  build/") == 0) tests += line.substr(8) + "\n";
    return tests;
  };
  write_file(in("tests.txt"), "build/test_all build/test_more build/test_third build/bf16/test_device_cpu "
                              "build/bf16/test_device_emu\nbuild/test_half\nbuild/program\n");
  write_file(in("more.h"), "#include \"half.h\"\n");
  write_file(in("more.cpp"), "int more(int x) { return x + 1; }\n");
  write_file(in("program.cpp"), "#include \"half.h\"\n#include \"alone.h\"\n");
  write_file(in("alone.h"), "inline int alone(int x) { return x + 1; }\n");
  for (const char* device : {"cpu", "gpu"})
    write_file(in(std::string(device) + ".h"), "inline int f(int x) { return x + 1; }\n");
  write_file(in("dev/test/test_all.cpp"), "#include \"more.h\"\n#include \"half.h\"\n");
  write_file(in("dev/test/test_more.cpp"), "#include \"more.h\"\nLongTest run(\"build/program\");\n");
  write_file(in("dev/test/test_third.cpp"), "// COVERS half.h\n#include \"more.h\"\n#include \"cpu.h\"\n");
  write_file(in("dev/test/test_half.cpp"), "#include \"half.h\"\n");
  write_file(in("dev/test/test_device.cu"), "#ifdef SLA_CPU\n#include \"cpu.h\"\n#else\n#include \"gpu.h\"\n#endif\n"
                                            "#include \"half.h\"\n#if defined(SLA_EMU)\n#include \"cpu.h\"\n#endif\n");
  EXPECT_EQ(tests_of("half.h"), "test_half -Long*\ntest_all -Long*\nbf16/test_device_cpu -Long*\ntest_third -Long*\n"
                                "test_half Long*\ntest_third Long*\n");
  EXPECT_EQ(tests_of("more.cpp"), "test_more -Long*\ntest_all -Long*\ntest_more Long*\n");
  EXPECT_EQ(tests_of("gpu.h"), "bf16/test_device_emu -Long*\nbf16/test_device_emu Long*\n");
  EXPECT_EQ(tests_of("cpu.h"), "test_third -Long*\nbf16/test_device_cpu -Long*\ntest_third Long*\n");
  EXPECT_EQ(tests_of("alone.h"), "test_more -Long*\ntest_more Long*\n");
  write_file(in("dev/test/test_half.cpp"), "// COVERS ONLY more.h\n#include \"half.h\"\n");
  EXPECT_EQ(tests_of("half.h"), "test_all -Long*\ntest_more -Long*\nbf16/test_device_cpu -Long*\ntest_third -Long*\n"
                                "test_all Long*\ntest_third Long*\n");
}

TEST_F(SmallProject, BadInputIsAnErrorThatSaysWhatToDo) {
  const auto expect_error = [&](const std::string& arguments, const std::string& part) {
    const Outcome o = mutate(arguments);
    EXPECT_EQ(o.exit_status, 1) << arguments;
    EXPECT_EQ(o.err.compare(0, 7, "error: "), 0) << o.err;
    EXPECT_NE(o.err.find(part), std::string::npos) << o.err;
  };
  expect_error("", "nothing to do; name files");
  expect_error("--fast", "--fast: no such option");
  expect_error("--sample", "--sample: its value is missing");
  expect_error("--sample x half.h", "--sample x: is no number");
  expect_error("nowhere.h --test checks", "nowhere.h: cannot be read; name a source file");
  expect_error("Makefile --test checks", "Makefile: is no C++ source");
  expect_error("half.h", "half.h: no test covers it; name one (--test)");
  expect_error("half.h --only nothing --test checks", "--only fits none");
  expect_error("half.h --test fails", "fails without a mutant; repair the tree first");
  expect_error("half.h --test missing", "does not build without a mutant either");
  EXPECT_TRUE(fs::is_empty(in("tmp")));
}

TEST_F(SmallProject, AnInterruptLeavesNothingAndTheTreeAsItWas) {
  write_file(in("checks.cpp"), "#include \"half.h\"\n#include <unistd.h>\nint main() { sleep(half(8) == 4 ? 0 : 60); "
                               "return 0; }\n");
  const std::string half = read_file(in("half.h"));
  const double start = seconds_now();
  const Outcome o = run("cd '" + folder + "' && mkdir -p tmp && TMPDIR=$PWD/tmp exec timeout -s INT 4 '" + program +
                        "' half.h --test checks");
  EXPECT_LT(seconds_now() - start, 15);
  EXPECT_NE(o.err.find("interrupted"), std::string::npos) << o.out << o.err;
  EXPECT_TRUE(fs::is_empty(in("tmp")));
  EXPECT_EQ(read_file(in("half.h")), half);
  EXPECT_FALSE(fs::exists(in("build")));
}
