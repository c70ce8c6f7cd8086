// Every program, given names, files and surroundings that nobody would wish it: an error of one line, at once, and
// nothing lost. Runs from the repository's root, where the programs of fp32 on the CPU, report, data/tokenize and
// data/convert lie.
// COVERS report.cpp evaluate_gpt2_sla.cu sample_gpt2_sla.cu data/convert.cpp data/tokenize.cpp llmc/train/logger.cpp
// COVERS llmc/train/position_losses.cpp
#include <unistd.h>
#include <algorithm>
#include <filesystem>
#include <sstream>
#include "command_line.h"

static const std::string sampler = "build/fp32/sample_gpt2_sla_cpu ", evaluator = "build/fp32/evaluate_gpt2_sla_cpu ",
                         convert = "data/convert ", tokenize = "data/tokenize ", report = "./report ";
static const std::string model = "dev/test/golden/baseline";  // plain, of bytes, context length 32
static const std::string small = " --layers 2 --heads 2 --channels 16 --vocab-size 257 --max-seq-len 16 -t 16 -b 2 -v "
                                 "0 ";

class Hostile : public CommandLine {
 protected:
  const std::string tokens = model + "/tokens.bin", text = in("text.txt"), a_run = in("run");

  void SetUp() override {
    write_file(text, "some text that goes on, and on, and on");
    fs::create_directory(a_run);
    write_file(a_run + "/log.jsonl", log_of("{}") + step(1, "3"));
  }
  static std::string log_of(const std::string& description) { return "{\"run\":" + description + "}\n"; }
  static std::string step(int n, const std::string& loss) {
    return "{\"step\":" + std::to_string(n) + ",\"loss\":" + loss + "}\n";
  }
  // A copy of the model whose config.json has other values.
  std::string model_with(const std::string& name, const json& changes) const {
    fs::copy(model, in(name));
    json config = json::parse(read_file(model + "/config.json"));
    config.update(changes);
    write_file(in(name + "/config.json"), config.dump());
    return in(name);
  }
  // The outcome of a command that must end within 20 seconds, with a line of error that is safe to print.
  Outcome expect_refusal(const std::string& command) const {
    const Outcome o = run("timeout -k 1 20 " + command);
    EXPECT_EQ(o.exit_status, 1) << command << "\n" << o.err;
    EXPECT_EQ(o.err.compare(0, 7, "error: "), 0) << command << "\n" << o.err;
    EXPECT_EQ(o.err.find('\n'), o.err.size() - 1) << command << "\n" << o.err;
    for (char c : o.err) EXPECT_TRUE(c == '\n' || (c >= ' ' && c != 0x7f)) << command << "\n" << o.err;
    return o;
  }
  // What each program does with a name, wherever it takes one.
  std::vector<std::string> commands_with(const std::string& name) const {
    write_file(in("outline"), "# Runs\nrun " + name + "\n");
    const std::string train = trainer + small + "-i " + tokens + " -x 1 ", out = " " + in("never") + " ",
                      evaluate = evaluator + model + " " + tokens + " --windows 1 ";
    return {trainer + "-i " + tokens + " -x 1 -e " + name,
            trainer + small + "-x 1 -i " + name,
            train + "-j " + name + " -v 1",
            train + "-o " + name,
            train + "-o " + in("never") + " -y --resume-from " + name,
            train + "--tokenizer " + name,
            train + "--config " + name,
            sampler + name,
            sampler + model + " --tokenizer " + name,
            sampler + model + " --prompt-file " + name,
            sampler + model + " --batch " + name,
            evaluator + name + " " + tokens,
            evaluator + model + " " + name,
            evaluator + model + " --lambada " + name,
            evaluate + "--tokenizer " + name,
            evaluate + "--json " + name,
            evaluate + "--positions " + name,
            convert + name + out,
            convert + name + ".jsonl " + in("never.bin") + " --tokenizer bytes",
            convert + model + " " + name,
            convert + model + " " + name + "/model.gguf",
            convert + model + out + "--tokenizer " + name,
            tokenize + "--out" + out + name,
            tokenize + "--out " + name + " " + text,
            tokenize + "--out" + out + text + " --tokenizer " + name,
            report + name,
            report + a_run + " -o " + name,
            report + a_run + " -o " + name + "/page.html",
            report + "-o " + in("page.html") + " --outline " + name,
            report + "-o " + in("page.html") + " --outline " + in("outline")};
  }
};

// ----------------------------------------------------------------------------
// Names

TEST_F(Hostile, NamesThatAreTooLongAreRefused) {
  for (const std::string& command : commands_with(in(std::string(256, 'n')))) expect_refusal(command);
  EXPECT_FALSE(fs::exists(in("never")));
}

TEST_F(Hostile, LinksThatLeadInACircleAreRefused) {
  fs::create_symlink("loop2", in("loop"));
  fs::create_symlink("loop", in("loop2"));
  for (const std::string& command : commands_with(in("loop/name"))) expect_refusal(command);
  for (const std::string& command : commands_with(in("loop")))
    if (command.find("loop.jsonl") == std::string::npos) expect_refusal(command);
  EXPECT_TRUE(fs::is_symlink(in("loop")) && fs::is_symlink(in("loop2")));
  EXPECT_FALSE(fs::exists(in("never")));
}

// The test's folder is its user's alone; a superuser gives up his rights.
TEST_F(Hostile, FoldersWithoutPermissionAreRefused) {
  std::string nobody;
  fs::copy(model, in("closed"));
  if (geteuid() == 0) {
    nobody = "setpriv --reuid 65534 --regid 65534 --clear-groups ";
    if (run(nobody + report + "--help").exit_status != 0) GTEST_SKIP() << "nobody else can run the programs";
  } else {
    chmod(in("closed").c_str(), 0);
  }
  for (const std::string& command : commands_with(in("closed/name"))) {
    const Outcome o = expect_refusal(nobody + command);
    EXPECT_TRUE(o.err.find("closed/name") != std::string::npos || o.err.find("Permission denied") != std::string::npos)
        << command << "\n"
        << o.err;
  }
  chmod(in("closed").c_str(), 0700);
}

TEST_F(Hostile, NamesThatAreNotUtf8AreKept) {
  fs::create_directory(in("texts"));
  const std::string name = in("texts/a\xff\\b.txt");
  write_file(name, "some text, some text, some text");
  fs::copy(model, in("model\xff"));
  write_file(in("vocabulary\xff.json"), read_file("dev/test/tokenizer/tokenizer.json"));
  const std::string command = tokenize + "--tokenizer '" + in("vocabulary\xff.json") + "' --shard-tokens 8 --out '";
  for (int time = 0; time < 2; time++) {  // it exists at the second time
    const Outcome o = run(command + in("out\xff") + "' " + in("texts"));
    EXPECT_EQ(o.exit_status, 0) << o.err;
  }
  const json manifest = json::parse(read_file(in("out\xff/MANIFEST.json")));
  EXPECT_EQ(manifest.at("sources").at(0).at("path"), in("texts/a\\xFF\\\\b.txt"));
  EXPECT_EQ(manifest.at("tokenizer").at("vocabulary"), in("vocabulary\\xFF.json"));
  const Outcome o = run(evaluator + "'" + in("model\xff") + "' '" + name + "' --json " + in("results.json"));
  EXPECT_EQ(o.exit_status, 0) << o.err;
  const json results = json::parse(read_file(in("results.json")));
  EXPECT_EQ(results.at("model"), in("model\\xFF"));
  EXPECT_EQ(results.at("texts").at(0).at("file"), in("texts/a\\xFF\\\\b.txt"));
  write_file(in("tokens\xff.bin"), shard_bytes(2000));
  EXPECT_EQ(run(trainer + small + "-i '" + in("tokens\xff.bin") + "' -x 1 -o '" + in("run\xff") + "'").exit_status, 0);
  const std::vector<json> log = read_log(in("run\xff"));
  EXPECT_EQ(log.at(0).at("run").at("train_data"), in("tokens\\xFF.bin"));
  EXPECT_EQ(log.back().at("checkpoint"), in("run\\xFF/step_00000001"));
}

TEST_F(Hostile, EscapesForTerminalsAreNotPassedOn) {
  const std::string escape = "\x1b]0;title\x07\x1b[31m";
  const std::string strange = model_with("strange", {{"model_type", escape + "\n"}}),
                    wired = model_with("wired", {{"wiring", escape + "(3)"}});
  for (const std::string& folder : {strange, wired}) {
    expect_refusal(sampler + folder);
    expect_refusal(evaluator + folder + " " + tokens);
    expect_refusal(convert + folder + " " + in("never"));
    expect_refusal(trainer + "-i " + tokens + " -x 1 -e " + folder);
  }
  write_file(in(escape), "no JSON\n");
  expect_refusal(tokenize + "--field text --out " + in("never") + " '" + in(escape) + "'");
  expect_refusal(report + "'" + in(escape) + "'");
  fs::create_directory(in("data"));
  write_file(in("data/0.bin"), shard_bytes(2000));
  write_file(in("data/" + escape + ".bin"), shard_bytes(3));
  const Outcome warned = run(trainer + small + "-x 1 -i '" + in("data/*.bin") + "'");
  EXPECT_EQ(warned.err.rfind("warning: -i ", 0), 0u) << warned.err;
  EXPECT_EQ(warned.err.find('\x1b'), std::string::npos) << warned.err;
}

// ----------------------------------------------------------------------------
// Standard streams

TEST_F(Hostile, OutputThatCannotBeWrittenIsAnErrorOfEveryProgram) {
  write_file(in("lines"), "a\nb\n");
  write_file(in("requests"), "{\"loglikelihood_rolling\":[\"abc\"]}\n");
  std::vector<std::string> commands = {sampler + model + " --prompt a -n 2 -q",
                                       sampler + model + " --batch " + in("lines") + " -n 2 -q",
                                       sampler + model + " -i -n 2 -q <" + in("lines"),
                                       evaluator + model + " " + tokens + " --windows 1 -q",
                                       evaluator + model + " --serve -q <" + in("requests"),
                                       report + a_run,
                                       convert + model + " " + in("converted"),
                                       tokenize + "--out " + in("out") + " " + text,
                                       trainer + small + "-i " + tokens + " --dry-run",
                                       trainer + small + "-i " + tokens + " -x 1 -o " + in("trained")};
  for (const std::string& program : {sampler, evaluator, report, convert, tokenize, trainer})
    commands.push_back(program + "--help");
  for (const std::string& command : commands) {
    const Outcome o = run(command + " >/dev/full");
    EXPECT_EQ(o.exit_status, 1) << command;
    EXPECT_NE(o.err.find("error: standard output cannot be written"), std::string::npos) << command << "\n" << o.err;
  }
  EXPECT_TRUE(fs::exists(in("trained/step_00000001"))) << "the run itself is complete";
}

TEST_F(Hostile, ClosedStreamsAreNotWrittenIntoFiles) {
  const std::string closed = " <&- >&- 2>&-";
  EXPECT_EQ(run(trainer + small + "-i " + tokens + " -x 3 -o " + in("out") + closed).exit_status, 0);
  EXPECT_EQ(steps_of(read_log(in("out"))).size(), 3u);  // every line is JSON
  EXPECT_EQ(read_file(in("out/lock")).rfind("process ", 0), 0u);
  EXPECT_EQ(run(convert + model + " " + in("closed.gguf") + closed).exit_status, 0);
  EXPECT_EQ(run(convert + model + " " + in("open.gguf")).exit_status, 0);
  EXPECT_EQ(read_file(in("closed.gguf")), read_file(in("open.gguf")));
  EXPECT_EQ(run(evaluator + model + " " + tokens + " --windows 1 --json " + in("results.json") + closed).exit_status,
            0);
  EXPECT_TRUE(json::parse(read_file(in("results.json"))).is_object());
  EXPECT_EQ(run(tokenize + "--out " + in("shards") + " " + text + closed).exit_status, 0);
  EXPECT_EQ(run(report + a_run + closed).exit_status, 0);
  EXPECT_EQ(read_file(a_run + "/report.html").rfind("<!doctype html>", 0), 0u);
}

// There are 20,000 texts to draw, and 2,000 requests, and nobody reads on after the first.
TEST_F(Hostile, AFilterEndsWhenNobodyReads) {
  std::string prompts, requests;
  for (int i = 0; i < 20000; i++) prompts += "a\n";
  for (int i = 0; i < 2000; i++) requests += "{\"loglikelihood_rolling\":[\"abcdefgh\"]}\n";
  write_file(in("prompts"), prompts);
  write_file(in("requests"), requests);
  for (const std::string& command : {sampler + model + " --batch " + in("prompts") + " -n 20 -q",
                                     evaluator + model + " --serve -q <" + in("requests")}) {
    const Outcome o = run("bash -c 'timeout 60 " + command + " | head -n 1; exit ${PIPESTATUS[0]}'");
    EXPECT_EQ(o.exit_status, 128 + SIGPIPE) << o.err;
    EXPECT_EQ(std::count(o.out.begin(), o.out.end(), '\n'), 1);
  }
}

// ----------------------------------------------------------------------------
// Outputs

TEST_F(Hostile, OutputsDoNotReplaceInputsDevicesAndLinks) {
  write_file(in("outline"), "# Runs\nrun " + a_run + "\n");
  const std::string log = read_file(a_run + "/log.jsonl"), evaluate = evaluator + model + " " + text + " -q ";
  fs::copy(model, in("model"));
  fs::copy(model, a_run + "/step_00000002");
  for (const std::string& folder : {in("model"), a_run + "/step_00000002"}) write_file(folder + "/state.json", "{}");
  for (const std::string& name : {a_run + "/lock", in("model/special_tokens_map.json"), in("MANIFEST.json")})
    write_file(name, "");
  fs::copy(text, in("text"));
  write_file(in("log.jsonl"), "");
  for (const std::string& command :
       {report + a_run + " -o " + a_run + "/log.jsonl", report + "--outline " + in("outline") + " -o " + in("outline"),
        report + "--outline " + in("outline") + " -o " + a_run + "/../run/log.jsonl", evaluate + "--json " + text,
        evaluate + "--positions " + text, evaluate + "--json " + in("a") + " --positions " + in("a"),
        evaluator + in("model") + " " + text + " --json " + in("model/config.json"),
        evaluator + in("model") + " " + text + " --positions " + in("model/model.safetensors"),
        evaluator + in("model") + " " + text + " --json " + in("model/state.json"),
        evaluator + in("model") + " " + text + " --json " + in("log.jsonl"),
        evaluator + in("model") + " " + text + " --json " + in("model/special_tokens_map.json"),
        evaluator + in("model") + " " + in("text") + " --json " + in("MANIFEST.json"),
        report + a_run + " -o " + a_run + "/lock",
        report + a_run + " -o " + a_run + "/step_00000002/model.safetensors"})
    EXPECT_NE(expect_refusal(command).err.find("reads or writes it as"), std::string::npos) << command;
  for (const std::string& option : {"--json " + in("a"), std::string("--windows 4"), std::string("--stride 4")})
    EXPECT_NE(expect_refusal(evaluator + model + " --serve " + option).err.find("go to stdout"), std::string::npos);
  EXPECT_EQ(read_file(a_run + "/log.jsonl"), log);
  EXPECT_EQ(read_file(in("model/config.json")), read_file(model + "/config.json"));
  EXPECT_FALSE(fs::exists(in("a")));

  fs::create_symlink("/dev/null", in("null"));
  write_file(in("page"), "");
  fs::create_symlink("page", in("link"));
  for (const char* output : {"null", "link"}) {
    EXPECT_EQ(run(report + a_run + " -o " + in(output)).exit_status, 0);
    EXPECT_EQ(run(evaluate + "--json " + in(output)).exit_status, 0);
    EXPECT_TRUE(fs::is_symlink(in(output)));
  }
  EXPECT_TRUE(json::parse(read_file(in("page"))).is_object());
  EXPECT_NE(run(report + a_run + " -o /dev/stdout | cat").out.find("<!doctype html>"), std::string::npos);
}

// Files cannot grow beyond 0 blocks, as on a disk without room.
TEST_F(Hostile, ResultsAreWrittenWholeOrNotAtAll) {
  write_file(in("old.csv"), "as it was");
  const std::string evaluate = evaluator + model + " " + tokens + " --windows 2 -q ";
  for (const char* option : {"--json ", "--positions "})
    for (const char* name : {"new.csv", "old.csv"}) {
      const Outcome o = run("bash -c 'ulimit -f 0; exec " + evaluate + option + in(name) + "' 2>&1 | cat");
      EXPECT_NE(o.out.find("error: " + in(name) + ": cannot be written: File too large"), std::string::npos) << o.out;
    }
  EXPECT_FALSE(fs::exists(in("new.csv")));
  EXPECT_EQ(read_file(in("old.csv")), "as it was");
}

TEST_F(Hostile, ManyReportsOfTheSameNameAtOnceAreAllWritten) {
  const Outcome o =
      run("for i in $(seq 40); do echo $i; done | xargs -P 8 -I@ " + report + a_run + " -o " + in("page.html"));
  EXPECT_EQ(o.exit_status, 0) << o.err;
  EXPECT_NE(read_file(in("page.html")).find("</html>\n"), std::string::npos);
}

TEST_F(Hostile, ARunWhoseFolderIsDeletedEndsWithAnError) {
  const Outcome o =
      run(trainer + small + "-i " + tokens + " -x 300 -o " + in("out") + " & run=$!\nuntil [ $(wc -l <" +
          in("out/log.jsonl") + " || echo 0) -gt 2 ]; do kill -0 $run || exit 9; sleep 0.01; done 2>/dev/null\n" +
          "rm " + in("out/log.jsonl") + "\nwait $run");
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("log.jsonl: has been deleted while the run writes it; the run continues"), std::string::npos)
      << o.err;
  EXPECT_NE(o.err.find("error: " + in("out/log.jsonl") + ": was deleted while the run wrote it"), std::string::npos)
      << o.err;
  EXPECT_NE(o.out.find("step 300/300"), std::string::npos);
}

// ----------------------------------------------------------------------------
// What files say

TEST_F(Hostile, ModelsThatFitInNoMemoryAreRefusedAtOnce) {
  const std::string deep = model_with("deep", {{"n_layer", 1000000000}});
  std::string terms;
  for (int i = 0; i < 100000; i++) terms += "sla(1,1) ";
  const std::string long_wiring = model_with("long_wiring", {{"wiring", terms}});
  for (const auto& [folder, message] : {std::pair(deep, "1000000000 layers"), {long_wiring, "more than 1000 terms"}})
    for (const std::string& command :
         {sampler + folder, evaluator + folder + " " + tokens, convert + folder + " " + in("never"),
          trainer + "-i " + tokens + " -x 1 -e " + folder})
      EXPECT_NE(expect_refusal(command).err.find(message), std::string::npos) << command;
  write_file(in("deep/config.json"), "{\"n_layer\":" + std::string(300000, '[') + std::string(300000, ']') + "}");
  expect_refusal(sampler + deep);
}

TEST_F(Hostile, LogsOfAnyKindAreReported) {
  const std::string nested = std::string(300000, '[') + std::string(300000, ']');
  const std::string logs[] = {log_of("{\"deep\":" + nested + "}") + step(1, "3"),
                              log_of("{}") + "{\"step\":1,\"x\":" + nested + "}\n",
                              log_of("{\"num_layers\":1000000000,\"num_heads\":1,\"wiring\":\"plain\"}"),
                              log_of("{\"num_layers\":1e300,\"num_heads\":1e300,\"wiring\":\"plain\"}"),
                              log_of("{}") + step(1, "1e-310") + step(2, "5e-324") + step(3, "1e308") +
                                  step(4, "-1e-400")};
  for (const std::string& log : logs) {
    write_file(a_run + "/log.jsonl", log);
    const Outcome o = run("timeout -k 1 20 " + report + a_run);
    EXPECT_EQ(o.exit_status, 0) << log.substr(0, 80) << "\n" << o.err;
  }
  EXPECT_NE(read_file(a_run + "/report.html").find("[1e-310,5e-324,1e+308,"), std::string::npos);
}

TEST_F(Hostile, IncompleteLossesByPositionAreRefused) {
  const std::string head = "position,tokens,loss\n";
  write_file(a_run + "/positions.csv", head + "1,10,3.5\n2,10,1e-310\n");
  EXPECT_EQ(run(report + a_run).exit_status, 0);
  for (const std::string& csv :
       {std::string(), head, head.substr(0, 8), head + "1,10,3.5\n2,10,3.", head + "1,10,3.5\n2,", head + "1,10,nan\n",
        head + "99999999999999999999,1,3\n", head + "1,1,0x10\n"}) {
    write_file(a_run + "/positions.csv", csv);
    EXPECT_NE(expect_refusal(report + a_run).err.find("positions.csv:"), std::string::npos) << csv;
  }
}

TEST_F(Hostile, RequestsWithImpossibleNumbersAreAnswered) {
  std::string requests;
  for (const char* value : {"\"top_k\":4294967297", "\"top_k\":1.5", "\"top_k\":-1", "\"max_tokens\":1e30",
                            "\"max_tokens\":2.5", "\"max_tokens\":18446744073709551615", "\"max_tokens\":0"})
    requests += std::string("{\"generate_until\":[{\"context\":\"a\",") + value + "}]}\n";
  requests += "{\"loglikelihood\":" + std::string(300000, '[') + std::string(300000, ']') + "}\n";
  write_file(in("requests"), requests + "{\"generate_until\":[{\"context\":\"a\",\"max_tokens\":2,\"top_k\":3}]}\n");
  const Outcome o = run(evaluator + model + " --serve -q <" + in("requests"));
  EXPECT_EQ(o.exit_status, 0) << o.err;
  std::istringstream lines(o.out);
  int errors = 0;
  std::string line;
  for (; std::getline(lines, line) && line.rfind("{\"error\":", 0) == 0; errors++) {}
  EXPECT_EQ(errors, 8) << o.out;
  EXPECT_EQ(line.rfind("{\"generate_until\":", 0), 0u) << line;
}

TEST_F(Hostile, ConvertTakesWholeLabelsAndNamesInCapitals) {
  const std::string question = "{\"ctx\":\"a b\",\"endings\":[\"c\",\"d\"],\"label\":";
  for (const std::string& label : {std::string("1.5"), std::string("1e30"), std::string("4294967296"),
                                   std::string("\"1\""), std::string(300000, '[')}) {
    write_file(in("q.jsonl"), question + label + "}\n");
    expect_refusal(convert + in("q.jsonl") + " " + in("q.bin") + " --tokenizer bytes");
  }
  write_file(in("Q.JSONL"), question + "1}\n");
  EXPECT_EQ(run(convert + in("Q.JSONL") + " " + in("Q.BIN") + " --tokenizer bytes").exit_status, 0);
  EXPECT_EQ(run(convert + model + " " + in("M.GGUF")).exit_status, 0);
  EXPECT_EQ(read_file(in("M.GGUF")).substr(0, 4), "GGUF");
}

// ----------------------------------------------------------------------------
// Scripts

// data/text.sh in a tree of its own.
TEST_F(Hostile, TextOfAnyNameBecomesTokens) {
  fs::create_directories(in("root/data"));
  for (const char* file : {"text.sh", "common.sh", "tokenize"})
    fs::copy_file(std::string("data/") + file, in("root/data/") + file);
  const std::string names[] = {"a\nb.txt",     "c\n", std::string(244, 'n'), "\x1b[31m [x]* $(rm) 'q'",
                               "\xff\xfe.txt", "..."};
  std::set<std::string> folders;
  for (const std::string& name : names) {
    write_file(in("name"), name);
    write_file(in(name), "some text that goes on, and on, and on");
    const Outcome o = run("bash -c 'IFS= read -r -d \"\" name <" + in("name") + "; exec " + in("root/data/text.sh") +
                          " " + in("\"$name\"") + "'");
    EXPECT_EQ(o.exit_status, 0) << name << "\n" << o.err;
    ASSERT_EQ(std::count(o.out.begin(), o.out.end(), '\n'), 1) << o.out;
    const std::string out = o.out.substr(0, o.out.size() - 1);
    EXPECT_TRUE(fs::exists(out + "/train_000000.bin")) << out;
    folders.insert(out);
  }
  EXPECT_EQ(folders.size(), std::size(names));
}
