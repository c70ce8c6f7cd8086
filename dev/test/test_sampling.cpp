// The program that samples, as users run it.
#include <algorithm>
#include <cstdio>
#include <set>
#include <sstream>
#include <tuple>
#include "command_line.h"
#include "llmc/base/clock.h"
#include "llmc/base/error.h"

// A model with random weights, of bytes: its folder has no vocabulary, and needs none.
// The model's context length is 32.
static const std::string sampler = "build/fp32/sample_gpt2_sla_cpu ", plain = "dev/test/golden/baseline ";

class Sampling : public CommandLine {
 protected:
  std::vector<json> lines_of(const std::string& text) const {
    std::vector<json> lines;
    std::istringstream stream(text);
    for (std::string line; std::getline(stream, line);) lines.push_back(json::parse(line));
    return lines;
  }
};

TEST_F(Sampling, IsTheSameWhateverIsSampledBesideIt) {
  std::string prompts = "a\nbcd\n\nlonger than the others\ne\n";
  for (int i = 0; i < 20; i++)
    prompts += std::string(size_t(1 + i % 7), char('a' + i)) + "\n";  // more than are computed in a pass
  write("prompts", prompts);
  for (const std::string& model : {plain, std::string("dev/test/golden/paper_default ")}) {
    const std::string command = sampler + model + "--batch " + in("prompts") + " -n 20 --seed 5 --slots ";
    const Outcome one = run(command + "1");
    ASSERT_EQ(one.exit_status, 0) << one.err;
    const std::vector<json> lines = lines_of(one.out);
    ASSERT_EQ(lines.size(), 25u);
    EXPECT_EQ(lines[1].at("prompt"), "bcd");
    EXPECT_EQ(lines[1].at("seed"), 6);
    EXPECT_NE(lines[0].at("text"), lines[4].at("text"));
    for (const char* slots : {"2", "3", "25"}) EXPECT_EQ(run(command + slots).out, one.out) << slots;
    const Outcome alone = run(sampler + model + "--prompt bcd -n 20 --seed 6");
    EXPECT_EQ(alone.exit_status, 0) << alone.err;
    EXPECT_EQ(alone.out.substr(0, 3), "bcd");
  }
}

// More texts at a time than a text has tokens, and than the context length.
TEST_F(Sampling, TakesManyShortTextsAtATime) {
  std::string prompts;
  for (int i = 0; i < 40; i++) prompts += "a\n";
  write("prompts", prompts);
  for (const char* options : {"-n 2", "-n 2 --slots 40", "-n 30 --slots 40"}) {
    const Outcome o = run(sampler + plain + "--batch " + in("prompts") + " " + options);
    EXPECT_EQ(o.exit_status, 0) << options << o.err;
    EXPECT_EQ(lines_of(o.out).size(), 40u) << options;
  }
}

TEST_F(Sampling, SaysWhyATextEnds) {
  write("prompt", "abc\n");
  auto ended_by = [&](const std::string& options) {
    const Outcome o = run(sampler + plain + "--batch " + in("prompt") + " " + options);
    EXPECT_EQ(o.exit_status, 0) << o.err;
    const json line = json::parse(o.out.substr(0, o.out.find('\n')));
    return line.at("ended_by").get<std::string>() + ", " + std::to_string(line.at("tokens").get<int>());
  };
  EXPECT_EQ(ended_by("-n 7 --temperature 0"), "number of tokens, 7");
  EXPECT_EQ(ended_by("-n 100 --temperature 0"), "context length, 28");  // of 32, 4 are the prompt's
  // The first letter that the model draws: no token before it has that byte.
  const std::string text =
      json::parse(run(sampler + plain + "--batch " + in("prompt") + " -n 28 --temperature 0").out).at("text");
  const size_t letter = text.find_first_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ");
  ASSERT_NE(letter, std::string::npos);
  EXPECT_EQ(ended_by("-n 28 --temperature 0 --stop " + text.substr(letter, 1)).substr(0, 9), "stop text");
  EXPECT_EQ(ended_by("-n 28 --temperature 0 --stop " + text.substr(letter, 1) + " --stop never").substr(0, 9), "stop "
                                                                                                               "text");
}

// At a high temperature each of the 257 tokens is as likely as another.
TEST_F(Sampling, EndsAtAnEndOfTextUnlessToldOtherwise) {
  std::string lines;
  for (int i = 0; i < 60; i++) lines += "x\n";
  write("prompts", lines);
  const std::string command = sampler + plain + "--batch " + in("prompts") + " -n 29 --temperature 1000 ";
  int ended = 0;
  for (const json& line : lines_of(run(command).out)) {
    ended += line.at("ended_by") == "end of text";
    EXPECT_EQ(line.at("ended_by") == "end of text", line.at("tokens") < 29) << line;
    EXPECT_EQ(line.at("text").get<std::string>().find("<|endoftext|>"), std::string::npos);
  }
  EXPECT_GE(ended, 1);
  int spelled = 0;
  for (const json& line : lines_of(run(command + "--ignore-end-of-text").out)) {
    EXPECT_EQ(line.at("ended_by"), "number of tokens");
    spelled += line.at("text").get<std::string>().find("<|endoftext|>") != std::string::npos;
  }
  EXPECT_GE(spelled, ended);
}

TEST_F(Sampling, OfTheTrainerIsTheSame) {
  const std::string options = " --prompt abc --temperature 0 ";
  const Outcome trained = run(trainer + "-e " + plain + "-x 0 -s 1 -g 20 -b 1" + options);
  const Outcome sampled = run(sampler + plain + "-n 16" + options);
  ASSERT_EQ(trained.exit_status, 0) << trained.err;
  ASSERT_EQ(sampled.exit_status, 0) << sampled.err;
  EXPECT_NE(trained.out.find("\n" + sampled.out + "---"), std::string::npos) << trained.out << "\n" << sampled.out;
  EXPECT_NE(sampled.err.find("prompt: 4 tokens"), std::string::npos) << sampled.err;
  EXPECT_NE(sampled.err.find("2048 bytes per token"), std::string::npos) << sampled.err;  // 4 layers, 64 of k and of v
}

TEST_F(Sampling, TakesLinesThatAreTyped) {
  const Outcome o = run("printf 'ab\\nx' | " + sampler + plain + "-i -n 3 -q --temperature 0");
  EXPECT_EQ(o.exit_status, 0);
  EXPECT_EQ(std::count(o.out.begin(), o.out.end(), '>'), 3) << o.out;
  const Outcome too_long = run("printf '%040d\\nab\\n' 7 | " + sampler + plain + "-i -n 3 -q");
  EXPECT_EQ(too_long.exit_status, 0);
  EXPECT_NE(too_long.err.find("error: the prompt makes 41 tokens, and the model's context length is 32"),
            std::string::npos)
      << too_long.err;
}

TEST_F(Sampling, OfATypedLineIsThatOfAPromptWithTheSameSeed) {
  std::set<std::string> texts;
  for (const char* seed : {"5", "6"}) {
    const std::string options = format(" -n 20 -q --seed %s", seed);
    const Outcome typed = run("echo ab | " + sampler + plain + "-i" + options),
                  given = run(sampler + plain + "--prompt ab" + options);
    EXPECT_EQ(typed.exit_status, 0) << typed.err;
    EXPECT_EQ("ab" + typed.out.substr(2, typed.out.rfind("> ") - 2), given.out) << typed.out;
    texts.insert(given.out);
  }
  EXPECT_EQ(texts.size(), 2u);
}

// The likeliest tokens come again and again; with a large penalty no token does.
TEST_F(Sampling, WithARepetitionPenaltyTokensDoNotComeAgain) {
  const auto text = [&](const std::string& options) {
    const Outcome o = run(sampler + plain + "--prompt a --temperature 0 -n 30 -q --repetition-penalty " + options);
    EXPECT_EQ(o.exit_status, 0) << o.err;
    return o.out.substr(0, o.out.size() - 1);  // without the newline at the end
  };
  const auto repeats = [](const std::string& text) {
    std::set<char> seen;
    return std::any_of(text.begin(), text.end(), [&](char c) { return uint8_t(c) < 128 && !seen.insert(c).second; });
  };
  EXPECT_TRUE(repeats(text("1"))) << text("1");
  EXPECT_FALSE(repeats(text("1000"))) << text("1000");
}

// The numbers that the program prints of a long prompt and one pass that draws, with and without a window.
TEST_F(Sampling, SpeedsAreOfThePromptAndOfTheDrawingAlone) {
  ASSERT_EQ(run(trainer + "-i " + write("data.bin", shard_bytes(9000)) +
                " --layers 2 --heads 2 --channels 32 --vocab-size 257 --max-seq-len 9000 -t 64 -b 1 -x 1 -v 0 "
                "--wiring plain -o " +
                in("run"))
                .exit_status,
            0);
  write("prompt", std::string(7999, 'a'));
  const double weights = 4 * (2 * (12 * 32 * 32 + 13 * 32) + 257 * 32 + 2 * 32), kv_of_a_token = 4 * 2 * 2 * 32;
  for (const auto& [wiring, least, most] : {std::tuple("plain", 8000, 8001), {"window(16)", 16, 2 * (15 + 1) + 256}}) {
    json config = json::parse(read_file(in("run/step_00000001/config.json")));
    config["wiring"] = wiring;
    write_file(in("run/step_00000001/config.json"), config.dump());
    fs::remove(in("run/step_00000001/state.json"));  // which has its checksum
    const double begin = seconds_now();
    const Outcome o = run(sampler + in("run/step_00000001") + " --prompt-file " + in("prompt") +
                          " -n 2 --seed 3 --ignore-end-of-text");
    const double elapsed = seconds_now() - begin;
    double prompt_speed = 0, speed = 0, bytes = 0;
    char unit = 0;
    ASSERT_EQ(sscanf(o.err.c_str(), "prompt: 8000 tokens, %lf tokens/s; drawn: 2 tokens, %lf tokens/s, %lf %cB/s",
                     &prompt_speed, &speed, &bytes, &unit),
              4)
        << o.err;
    EXPECT_LT(8000 / prompt_speed + 1 / speed, elapsed) << o.err;
    EXPECT_LT(1 / speed, 0.5 * 8000 / prompt_speed) << o.err;
    const double read = bytes * (unit == 'G' ? 1e9 : unit == 'M' ? 1e6 : 1e3) / speed;  // by a pass
    EXPECT_GT(read, 0.99 * (weights + least * kv_of_a_token)) << o.err;
    EXPECT_LT(read, 1.01 * (weights + most * kv_of_a_token)) << o.err;
  }
}

TEST_F(Sampling, StopsAtASignal) {
  ASSERT_EQ(run(trainer + "-i " + write("data.bin", shard_bytes(9000)) +
                " --layers 2 --heads 2 --channels 32 --vocab-size 257 --max-seq-len 60000 -t 64 -b 1 -x 1 -v 0 -o " +
                in("run"))
                .exit_status,
            0);
  const Outcome o = run("timeout -s INT 0.6 " + sampler + in("run/step_00000001") +
                        " -n 59000 --ignore-end-of-text; echo \"status $?\"");
  EXPECT_NE(o.out.find("status 124"), std::string::npos) << o.out.substr(0, 200);  // timeout's own
  const size_t drawn = o.err.find("drawn: ");
  ASSERT_NE(drawn, std::string::npos) << o.err;
  EXPECT_LT(std::stoi(o.err.substr(drawn + 7)), 58000) << o.err;
}

// The keyboard is one on which nobody types. Status 137: it had to be killed.
TEST_F(Sampling, EndsWithTheStatusOfTheSignalThatStopsIt) {
  const std::string keyboard = in("keyboard");
  for (const auto& [signal, status] : {std::pair("INT", 130), {"TERM", 143}})
    for (const char* text : {"-i", "--batch -"}) {
      const Outcome o = run(format("rm -f %s; mkfifo %s; sleep 20 > %s & timeout --preserve-status -k 5 -s %s 0.4 ",
                                   keyboard.c_str(), keyboard.c_str(), keyboard.c_str(), signal) +
                            alone + sampler + plain + text + " < " + keyboard + "; echo \"status $?\"; kill $!");
      EXPECT_NE(o.out.find(format("status %d\n", status)), std::string::npos) << text << o.out << o.err;
    }
}

TEST_F(Sampling, TellsTheSpeedUnlessItIsToBeQuiet) {
  EXPECT_EQ(run(sampler + plain + "--prompt a -n 2 -q").err, "");
  EXPECT_EQ(run(sampler + plain + "--prompt a -n 2").err.rfind("prompt: 2 tokens", 0), 0u);
}

// A text's first token is drawn without a pass of its own.
TEST_F(Sampling, CountsEveryTokenThatIsDrawn) {
  EXPECT_NE(run(sampler + plain + "--prompt a -n 5 --seed 3").err.find("drawn: 5 tokens"), std::string::npos);
  const Outcome o = run("printf 'a\\nb\\nc\\n' | " + sampler + plain + "--batch - -n 4 --ignore-end-of-text");
  EXPECT_NE(o.err.find("drawn: 12 tokens"), std::string::npos) << o.err;
}

TEST_F(Sampling, TakesLinesFromOtherSystemsAndFromStandardInput) {
  const std::string options = sampler + plain + "-n 3 --temperature 0 -q ";
  const std::string expected = run(options + "--batch " + write("lines", "ab\nc\n\nd")).out;
  ASSERT_EQ(lines_of(expected).size(), 4u);
  EXPECT_EQ(run(options + "--batch - < " + in("lines")).out, expected);
  for (const char* lines : {"ab\r\nc\r\n\r\nd\r\n", "\xEF\xBB\xBF"
                                                    "ab\nc\n\nd\n"})
    EXPECT_EQ(run(options + "--batch " + write("others", lines)).out, expected);
  EXPECT_EQ(run(options + "--prompt-file - < " + write("prompt", "ab")).out, run(options + "--prompt ab").out);
  EXPECT_EQ(run(options + "-i < " + write("typed", "ab\r\n")).out, run(options + "-i < " + write("typed", "ab\n")).out);
}

// 0 is the limit of small numbers.
TEST_F(Sampling, OfAVanishingTemperatureOrTopPIsTheLikeliest) {
  const std::string options = sampler + plain + "--prompt abc -n 20 -q ";
  const std::string expected = run(options + "--temperature 0").out;
  for (const char* other : {"--temperature 1e-300", "--temperature 1e-320", "--top-p 0", "--top-p 1e-300", "--top-k 1",
                            "--top-p 0 --temperature 100", "--temperature 1e-300 --top-p 0.5"})
    EXPECT_EQ(run(options + other).out, expected) << other;
}

// Attention that hashes, and segments with a memory, have caches of their own. test_terms has every term.
TEST_F(Sampling, TakesModelsWithoutAttentionToAllKeys) {
  write("data.bin", shard_bytes(2000));
  write("prompts", "a\nbcd\nlonger than the others\n");
  for (const auto& [wiring, bytes] :
       {std::pair("lsh(4,2)", 1152), {"reversible lsh(4,2)", 1152}, {"rope memory(16)", 1024}}) {
    ASSERT_EQ(run(alone + trainer + "-i " + in("data.bin") + small_model + "-x 1 -v 0 --wiring '" + wiring + "' -o '" +
                  in(wiring) + "'")
                  .exit_status,
              0);
    const std::string model = sampler + "'" + in(wiring) + "/step_00000001' -n 6 ";
    const Outcome prompt = run(model + "--prompt ab"), batch = run(model + "--batch " + in("prompts"));
    EXPECT_EQ(prompt.exit_status, 0) << wiring << prompt.err;
    EXPECT_NE(prompt.err.find(format(", %d bytes per token", bytes)), std::string::npos) << prompt.err;
    EXPECT_EQ(batch.exit_status, 0) << wiring << batch.err;
    EXPECT_EQ(batch.out, run(model + "--slots 1 --batch " + in("prompts")).out) << wiring;
  }
}

TEST_F(Sampling, RefusesWhatCannotBe) {
  write("prompts", "ab\n" + std::string(50, 'x') + "\n");
  write("empty", "");
  const struct {
    std::string arguments, message;
  } cases[] = {{"", "MODEL"},
               {in("nowhere"), "config.json: cannot be read"},
               {"dev/test/golden/odd_shapes", "has no vocabulary"},
               {"dev/test/golden/odd_shapes --tokenizer none", "--tokenizer none: prompts and samples are texts"},
               {plain + "--tokenizer " + in("nothing"), "cannot be read"},
               {plain + "--prompt a -i", "give one of them"},
               {plain + "--prompt " + std::string(40, 'x'), "the prompt makes 41 tokens, and the model's context "
                                                            "length is 32"},
               {plain + "--batch " + in("prompts"), "line 2: the prompt makes 51 tokens"},
               {plain + "--batch " + in("empty"), "has no line"},
               {plain + "--prompt-file " + in("nothing"), "cannot be read"},
               {plain + "-n 0", "-n 0: it must lie between"},
               {plain + "--temperature -1", "--temperature -1"},
               {plain + "--top-p 1.5", "--top-p 1.5"},
               {plain + "--slots 0", "--slots 0"}};
  for (const auto& c : cases) {
    const Outcome o = run(sampler + c.arguments);
    EXPECT_EQ(o.exit_status, 1) << c.arguments;
    EXPECT_EQ(o.err.rfind("error: ", 0), 0u) << o.err;
    EXPECT_NE(o.err.find(c.message), std::string::npos) << o.err;
    EXPECT_EQ(o.out, "") << c.arguments;
  }
}
