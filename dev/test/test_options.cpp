// The trainer's options: the command line, TOML, the model that they describe; and the numbers in all of them.
#include <gtest/gtest.h>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include "files.h"
#include "helpers.h"
#include "llmc/train/config_toml.h"
#include "llmc/train/model_options.h"
#include "llmc/ranks/ranks.h"
#include "llmc/train/sampling.h"
#include "llmc/train/option.h"
#include "llmc/train/options.h"
#include "llmc/base/number.h"
#include "llmc/base/text.h"

// ----------------------------------------------------------------------------
// Numbers

TEST(Numbers, AreReadInEveryDecimalForm) {
  for (const char* half : {"0.5", ".5", "+.5", "5e-1", "0.05e1", "50E-2"}) EXPECT_EQ(parse_number<double>(half), 0.5);
  EXPECT_EQ(parse_number<double>("5."), 5);
  EXPECT_EQ(parse_number<double>("-3"), -3);
  EXPECT_EQ(parse_number<int>("+12"), 12);
  EXPECT_EQ(parse_number<int>("-010"), -10) << "no octal number";
  EXPECT_EQ(parse_number<int64_t>("9223372036854775807"), INT64_MAX);
  EXPECT_EQ(parse_number<int64_t>("-9223372036854775808"), INT64_MIN);
}

TEST(Numbers, ThatAreDenormalAreNumbers) {
  EXPECT_EQ(parse_number<double>("1e-310"), 1e-310);
  EXPECT_EQ(parse_number<double>("-1e-310"), -1e-310);
  EXPECT_EQ(parse_number<double>("4.9406564584124654e-324"), std::numeric_limits<double>::denorm_min());
}

TEST(Numbers, ComeBackFromTheirShortestText) {
  EXPECT_EQ(shortest(3e-4), "0.0003");
  EXPECT_EQ(shortest(1e-8), "1e-08");
  EXPECT_EQ(shortest(45), "45");
  std::mt19937_64 random(3);
  for (int i = 0; i < 100000; i++) {
    const uint64_t bits = random();
    double x;
    memcpy(&x, &bits, sizeof x);
    if (x - x != 0) continue;  // infinite, or NaN
    EXPECT_EQ(parse_number<double>(shortest(x)), x) << shortest(x);
  }
}

TEST(Numbers, ThatNoTypeHoldsAreRefused) {
  for (const char* text : {"1e400", "-1e400", "1e-400"})
    EXPECT_ERROR(parse_number<double>(text), std::string(text) + ": is out of range");
  EXPECT_ERROR(parse_number<int64_t>("9223372036854775808"), "9223372036854775808: is out of range");
  EXPECT_ERROR(parse_number<int>("-2147483649"), "-2147483649: is out of range");
}

// The other programs' options are CLI11's own.
TEST(Numbers, OfOtherProgramsOptionsAreReadAlike) {
  auto parsed = [](const char* option, const char* text) {
    SampleOptions options;
    const char* argv[] = {"sample", "model", option, text};
    parse_sample_options(4, const_cast<char**>(argv), options);
    return options;
  };
  EXPECT_EQ(parsed("--temperature", "1e-310").sampling.temperature, 1e-310);
  EXPECT_EQ(parsed("--top-p", "0.30000000000000004").sampling.top_p, 0.1 + 0.2);
  EXPECT_EQ(parsed("--tokens", "010").tokens, 10);
  EXPECT_ERROR(parsed("--tokens", "0x10"), "--tokens: 0x10: is not a whole number");
  EXPECT_ERROR(parsed("--seed", "99999999999999999999"), "--seed: 99999999999999999999: is out of range");
  EXPECT_ERROR(parsed("--top-p", "nan"), "--top-p: nan: is not a number");
}

TEST(Numbers, OfSlurmsVariablesAreReadAlike) {
  setenv("SLURM_STEP_NUM_TASKS", "8", 1), setenv("SLURM_LOCALID", "3", 1);
  setenv("SLURM_PROCID", "3", 1);
  EXPECT_EQ(init_ranks("nowhere", "").rank, 3);
  setenv("SLURM_PROCID", "3,4", 1);
  EXPECT_ERROR(init_ranks("nowhere", ""), "the environment variable SLURM_PROCID=3,4: is not a whole number");
  unsetenv("SLURM_LOCALID");
  unsetenv("SLURM_PROCID");
  unsetenv("SLURM_STEP_NUM_TASKS");
}

TEST(Numbers, TextThatIsNoNumberIsRefused) {
  for (const char* text : {"", " 1", "1 ", "1e", "1e-3e", "1,5", "0x10", "--1", "+-1", "-+1", "+", ".", "e5", "inf",
                           "-inf", "infinity", "nan", "nan(0)", "many"}) {
    EXPECT_ERROR(parse_number<double>(text), std::string(text) + ": is not a number");
    EXPECT_ERROR(parse_number<int>(text), std::string(text) + ": is not a whole number");
  }
  for (const char* text : {"4.5", "1e3", "5."}) EXPECT_ERROR(parse_number<int>(text), "is not a whole number");
}

// ----------------------------------------------------------------------------
// Options

static TrainOptions parse(std::vector<std::string> words) {
  std::vector<char*> argv = {const_cast<char*>("train_gpt2_sla")};
  for (std::string& word : words) argv.push_back(word.data());
  TrainOptions options;
  parse_options(int(argv.size()), argv.data(), options);
  return options;
}

TEST(Options, WrittenAsTomlReadBackTheSame) {
  TemporaryFolder folder;
  const TrainOptions first =
      parse({"-i", "data/*.bin", "-e",       "d24",   "--layers", "8",   "--shuffle", "-l", "0.00015", "-t", "77",
             "-k", "wsd",        "--wiring", "plain", "-d",       "154", "-b",        "2",  "--seed",  "9"});
  EXPECT_EQ(first.as_toml.find("=\"\""), std::string::npos) << "options that were not given are not there";
  std::ofstream(folder.path + "/config.toml") << first.as_toml;
  const TrainOptions second = parse({"--config", folder.path + "/config.toml"});
  EXPECT_EQ(second.as_toml, first.as_toml);
  EXPECT_EQ(second.train_data, "data/*.bin");
  EXPECT_EQ(second.learning_rate, 0.00015);
  EXPECT_EQ(second.model.layers, 8);
  EXPECT_FALSE(second.model.heads.has_value());
  EXPECT_EQ(second.model.wiring, "plain");
  EXPECT_TRUE(second.shuffle);
  EXPECT_FALSE(second.model.no_bias);
  EXPECT_EQ(parse({"--config", folder.path + "/config.toml", "-l", "0.5"}).learning_rate, 0.5) << "the command line "
                                                                                                  "wins";
}

TEST(Options, AnyTextComesBackFromToml) {
  TemporaryFolder folder;
  const std::string path = folder.path + "/config.toml";
  for (const char* text : {"a # b", "two\nlines", "say \"so\"", "it's", "back\\slash", "tab\t", "'''", "\"\"\"", "[x]",
                           " = ", "12", "true", "-x", "gr\xc3\xbc\xc3\x9f", "\x01", "\r\n", "{}", "--", "\x7f"}) {
    const TrainOptions first = parse({"-i", text, "-s", "1", "--prompt", text, "-l", ".5", "--tokenizer", "a b"});
    write_file(path, first.as_toml);
    const TrainOptions second = parse({"--config", path});
    EXPECT_EQ(second.prompt, text) << first.as_toml;
    EXPECT_EQ(second.train_data, text);
    EXPECT_EQ(second.learning_rate, 0.5);
    EXPECT_EQ(second.as_toml, first.as_toml);
  }
}

// A folder of another name would be written to.
TEST(Options, TextThatIsNotUtf8IsACommentInToml) {
  EXPECT_EQ(config_toml_line("out", std::string("Stra\xdf"
                                                "e\n")),
            "# out: \"Stra\ufffde\\u000A\", which is not UTF-8 as it was; give it on the command line\n");
}

TEST(Options, AConfigFileThatIsNotUnderstoodIsRefused) {
  TemporaryFolder folder;
  const std::string path = folder.path + "/c.toml";
  auto expect_error = [&](const std::string& text, const std::string& part) {
    write_file(path, text);
    EXPECT_ERROR(parse({"-i", "x", "--config", path}), path + part);
  };
  expect_error("steps = 3\nlearning_rate = 0.05\n", ":2: learning_rate: no such option: is it learning-rate?");
  expect_error("steps = 3\nsteps = 4\n", ":2: is not TOML");
  expect_error("this is not toml at all\n", ":1: is not TOML");
  expect_error("[ranks]\nlayers = 3\n", ":1: ranks: is a section");
  expect_error("steps = [1, 2]\n", ":1: steps: is a section, a list or a date");
  expect_error("prompt = \"open\n", ":1: is not TOML");
  expect_error("help = true\n", ":1: help: no such option");
  expect_error("config = \"x\"\n", ":1: config: no such option");
  expect_error("quetzalcoatl = 1\n", ":1: quetzalcoatl: no such option; --help");
  expect_error("shuffle = true\nsteps = \"many\"\n", ":2: steps many: is not a whole number");
  expect_error("shuffle = 2\n", ":1: shuffle 2: is neither 1 (true) nor 0 (false)");
  expect_error("learning-rate = inf\n", ":1: learning-rate inf: is not a number");
  expect_error("dry-run = true\n", ":1: dry-run: no such option");
  expect_error("steps = 1\nout = \"a\\u0000b\"\n", ":2: out: holds a character of value 0");
  EXPECT_ERROR(parse({"-i", "x", "--config", folder.path + "/nowhere"}), "nowhere");
}

// A byte, a name or a value of a config file is changed: it is an error, or every entry means what it says and all
// others are as they were.
TEST(Options, AChangedConfigFileIsRefusedOrMeansWhatItSays) {
  TemporaryFolder folder;
  const std::string path = folder.path + "/c.toml", other = folder.path + "/other.toml";
  const std::string whole =
      parse({"-i", "data/*.bin", "-x", "7", "-s", "1", "--prompt", "a # b", "--layers", "3", "-o", "out"}).as_toml;
  std::mt19937 random(5);
  auto drawn = [&](size_t below) { return size_t(random() % below); };
  auto entries_of = [](const std::string& file) {
    std::map<std::string, std::string> entries;
    for (const ConfigEntry& entry : read_config_toml(file)) entries[entry.name] = entry.value;
    return entries;
  };
  auto same = [](const std::string& a, const std::string& b) {  // as text, or as numbers
    char *end_a, *end_b;
    const double x = strtod(a.c_str(), &end_a), y = strtod(b.c_str(), &end_b);
    return a == b || (*end_a == '\0' && *end_b == '\0' && x == y);
  };
  write_file(path, whole);
  const auto before = entries_of(path);
  int refused = 0, taken = 0;
  for (int i = 0; i < 1000; i++) {
    std::string text = whole;
    const size_t at = drawn(text.size());
    if (i % 3 == 0) text[at] = char(drawn(256));
    else if (i % 3 == 1) text.erase(at, 1 + drawn(3));
    else text.insert(at, std::string(1 + drawn(2), " =\"#-_.0179ex\n"[drawn(14)]));
    write_file(path, text);
    TrainOptions options;
    if (!error_of([&] { options = parse({"--config", path}); }).empty()) {
      refused++;
      continue;
    }
    taken++;
    write_file(other, options.as_toml);
    const auto said = entries_of(path), meant = entries_of(other);
    for (const auto& [name, value] : said) {
      const auto it = meant.find(name);
      EXPECT_TRUE(value.empty() || (it != meant.end() && same(it->second, value))) << name << " = " << value << " in\n"
                                                                                   << text;
    }
    for (const auto& entry : meant) {
      if (said.count(entry.first) == 0) { EXPECT_NE(before.find(entry.first), before.end()) << entry.first; }
    }
  }
  printf("%d of 1000 changed files were refused, %d were taken as they are\n", refused, taken);
  EXPECT_GT(refused, 300);
  EXPECT_GT(taken, 50);
}

TEST(Options, NumbersAreReadAsEverywhere) {
  TemporaryFolder folder;
  const std::string path = folder.path + "/config.toml";
  EXPECT_EQ(parse({"-i", "x", "-l", "1e-310"}).learning_rate, 1e-310);
  write_file(path, parse({"-i", "x", "-l", "1e-310"}).as_toml);
  EXPECT_EQ(parse({"--config", path}).learning_rate, 1e-310);
  EXPECT_EQ(parse({"-i", "x", "-x", "010"}).steps, 10);
  EXPECT_ERROR(parse({"-i", "x", "-x", "0x10"}), "-x 0x10: is not a whole number");
  EXPECT_ERROR(parse({"-i", "x", "-l", "1e400"}), "-l 1e400: is out of range");
}

TEST(Options, ANumberThatIsTooLargeIsRefused) {
  for (const char* option : {"--seed", "-x", "-d"}) {
    EXPECT_ERROR(parse({"-i", "x", option, "99999999999999999999"}), "99999999999999999999: is out of range");
    EXPECT_ERROR(parse({"-i", "x", option, "-99999999999999999999"}), "is out of range");
  }
  EXPECT_EQ(parse({"-i", "x", "--seed", "9223372036854775807"}).seed, INT64_MAX);
}

TEST(Options, ResumeIsAFlagOrLlmcsNumber) {
  EXPECT_FALSE(parse({"-i", "x"}).resume);
  EXPECT_TRUE(parse({"-i", "x", "-o", "out", "-y"}).resume);
  EXPECT_TRUE(parse({"-i", "x", "-y", "1", "-o", "out"}).resume);
  EXPECT_FALSE(parse({"-i", "x", "-y", "0"}).resume);
  EXPECT_ERROR(parse({"-i", "x", "-o", "out", "-y", "2"}), "-y 2");
  EXPECT_TRUE(parse({"-i", "x", "-o", "out", "--resume-from", "out/step_00000001"}).resume);
  EXPECT_TRUE(parse({"-i", "x", "-o", "out", "--resume-from", "out/step_00000001", "--same-options"}).resume);
}

TEST(Options, WithoutAStepNeedNoTrainingData) {
  EXPECT_TRUE(parse({"-x", "0", "-s", "1"}).train_data.empty());
  EXPECT_ERROR(parse({"-x", "0", "-o", "out", "-y"}), "-y: resumes training; name its data with -i");
  EXPECT_ERROR(parse({"-x", "1"}), "no training data");
}

TEST(Options, ThatMakeNoSenseAreRefused) {
  EXPECT_ERROR(parse({}), "no training data");
  EXPECT_ERROR(parse({"-i", "x", "--colour"}), "--colour");
  EXPECT_ERROR(parse({"-i", "x", "-b", "many"}), "many");
  EXPECT_ERROR(parse({"-i", "x", "-b", "4.5"}), "4.5");
  EXPECT_ERROR(parse({"-i", "x", "-b", "0"}), "-b 0");
  EXPECT_ERROR(parse({"-i", "x", "-l", "1e-4x"}), "1e-4x");
  EXPECT_ERROR(parse({"-i", "x", "-l", "nan"}), "-l nan");
  EXPECT_ERROR(parse({"-i", "x", "-k", "cosin"}), "-k cosin");
  EXPECT_ERROR(parse({"-i", "x", "-x", "-1"}), "-x -1");
  EXPECT_ERROR(parse({"-i", "x", "--beta1", "1"}), "--beta1 1");
  EXPECT_ERROR(parse({"-i", "x", "--optimizer", "sgd"}), "--optimizer sgd: it must be adamw or muon");
  EXPECT_ERROR(parse({"-i", "x", "--momentum", "1"}), "--momentum 1");
  EXPECT_ERROR(parse({"-i", "x", "--temperature", "-1"}), "--temperature -1");
  EXPECT_ERROR(parse({"-i", "x", "-n", "5"}), "-n: checkpoints need a folder");
  EXPECT_ERROR(parse({"-i", "x", "--keep", "2"}), "--keep: checkpoints need a folder");
  EXPECT_ERROR(parse({"-i", "x", "-o", "out", "--keep", "-1"}), "--keep -1");
  EXPECT_ERROR(parse({"-i", "x", "-o", "out", "--keep-every", "100"}), "--keep-every: says which of those that --keep "
                                                                       "removes are kept");
  EXPECT_ERROR(parse({"-i", "x", "--resume-from", "out/step_00000001"}), "--resume-from: names a checkpoint in a "
                                                                         "folder");
  EXPECT_ERROR(parse({"-i", "x", "--max-bad-steps", "0"}), "--max-bad-steps 0");
  EXPECT_ERROR(parse({"-i", "x", "--config", "/nowhere.toml"}), "nowhere.toml");
}

// What is outside of the range of an option, and what is just inside. What is rounded when it is used is so before.
TEST(Options, OutsideTheirRangeAreRefused) {
  struct Case {
    const char *flag, *outside, *inside;
  };
  const Case cases[] = {{"--layers", "0", "1"},
                        {"--heads", "0", "1"},
                        {"--channels", "-1", "1"},
                        {"--vocab-size", "0", "1"},
                        {"--max-seq-len", "0", "1"},
                        {"-b", "0", "1"},
                        {"-t", "0", "1"},
                        {"-d", "0", "1"},
                        {"-d", "1000000000000001", "1000000000000000"},
                        {"-r", "-1", "0"},
                        {"-r", "5", "4"},
                        {"-x", "-1", "0"},
                        {"-k", "cosines", "wsd"},
                        {"-l", "-1e-310", "0"},
                        {"-l", "1000.1", "1000"},
                        {"-u", "-1", "0"},
                        {"-q", "-0.1", "0"},
                        {"-q", "1.1", "1"},
                        {"-c", "-0.1", "0"},
                        {"-c", "1001", "1000"},
                        {"--grad-clip", "-1", "0"},
                        {"--grad-clip", "2e+30", "1e30"},
                        {"--dropout", "-0.1", "0"},
                        {"--dropout", "1", "0.999"},
                        {"--dropout", "0.999993", "0.99999"},
                        {"--max-bad-steps", "0", "1"},
                        {"--optimizer", "sgd", "muon"},
                        {"--momentum", "-0.1", "0"},
                        {"--momentum", "1", "0.999"},
                        {"--momentum", "0.99999999", "0.9999999"},
                        {"--beta1", "-0.1", "0"},
                        {"--beta1", "1", "0.999"},
                        {"--beta2", "-0.1", "0"},
                        {"--beta2", "1", "0.999"},
                        {"--eps", "0", "1e-45"},
                        {"--eps", "1e-46", "1e-45"},
                        {"--seed", "-1", "0"},
                        {"--zero", "-1", "0"},
                        {"--zero", "2", "1"},
                        {"--hang-timeout", "1.9", "2"},
                        {"--hang-timeout", "-1", "0"},
                        {"-v", "-1", "0"},
                        {"-m", "-1", "0"},
                        {"-s", "-1", "0"},
                        {"-g", "0", "1"},
                        {"--temperature", "-0.1", "0"},
                        {"-n", "-1", "0"},
                        {"--keep", "-1", "0"},
                        {"--keep-every", "-1", "0"},
                        {"--log-level", "loud", "debug"}};
  std::set<std::string> tried;
  for (const Case& c : cases) {
    EXPECT_ERROR(parse({"-i", "x", c.flag, c.outside}), std::string(c.flag) + " " + c.outside + ": it must ");
    EXPECT_EQ(error_of([&] { parse({"-i", "x", c.flag, c.inside}); }), "") << c.flag;
    tried.insert(c.flag);
  }
  TrainOptions options;
  for (const Option& option : train_options(options))
    EXPECT_EQ(tried.count(option.flag()), option.range ? 1u : 0u) << option.flag();
  EXPECT_ERROR(parse({"-i", "x", "-g", "0"}), "-g 0: it must be at least 1");
  EXPECT_ERROR(parse({"-i", "x", "-r", "5"}), "-r 5: it must lie between 0 and 4");
  EXPECT_ERROR(parse({"-i", "x", "--beta1", "1"}), "--beta1 1: it must lie in [0, 1)");
  EXPECT_ERROR(parse({"-i", "x", "--hang-timeout", "1"}), "--hang-timeout 1: it must be 0, or at least 2 seconds");
  EXPECT_ERROR(parse({"-i", "x", "-k", "cosin"}), "-k cosin: it must be cosine, linear, constant or wsd");
}

TEST(Options, ThatThereAreNotNameTheNearest) {
  EXPECT_ERROR(parse({"-i", "x", "--learning_rate", "1e-3"}), "--learning_rate: no such option; did you mean "
                                                              "--learning-rate?; --help lists the options");
  EXPECT_ERROR(parse({"-i", "x", "--warm-up=3"}), "--warm-up: no such option; did you mean --warmup?");
  EXPECT_ERROR(parse({"-i", "x", "--zzzzzz", "3"}), "--zzzzzz: no such option; --help");
  EXPECT_ERROR(parse({"-i", "x", "3"}), "3: is not expected");
  const char* argv[] = {"sample", "model", "--top_p", "0.5"};
  SampleOptions options;
  EXPECT_ERROR(parse_sample_options(4, const_cast<char**>(argv), options), "--top_p: no such option; did you mean "
                                                                           "--top-p?");
}

TEST(Options, WithoutOthersThatTheyNeedAreRefused) {
  EXPECT_ERROR(parse({"-i", "x", "--prompt", "a"}), "--prompt: is the beginning of samples");
  EXPECT_ERROR(parse({"-i", "x", "--json"}), "--json: is the form of what --dry-run prints");
  EXPECT_ERROR(parse({"-i", "x", "-y"}), "-y: resumes from the checkpoints in a folder; name it with -o");
  EXPECT_ERROR(parse({"-x", "0", "-o", "out", "--resume-from", "a"}), "--resume-from: resumes training; name its data");
  const TrainOptions all = parse({"-i", "x", "-o", "out", "-s", "1", "--prompt", "a", "-y", "-n", "1", "--keep", "1",
                                  "--keep-every", "2", "--resume-from", "a"});
  EXPECT_TRUE(all.resume);
}

TEST(Options, ThatAreComparedOnResumingHaveAKey) {
  TrainOptions options;
  std::set<std::string> keys;
  for (const Option& option : train_options(options)) {
    if (option.key != nullptr) { EXPECT_TRUE(keys.insert(option.key).second) << option.key; }
    if (option.on_resume != OnResume::ignored) { EXPECT_NE(option.key, nullptr) << option.flags; }
  }
  EXPECT_TRUE(keys.count("learning_rate"));
}

TEST(Options, OfAFlagTheValueCanBeSaid) {
  EXPECT_TRUE(parse({"-i", "x", "--shuffle"}).shuffle);
  EXPECT_TRUE(parse({"-i", "x", "--shuffle=true"}).shuffle);
  EXPECT_FALSE(parse({"-i", "x", "--shuffle", "--shuffle=0"}).shuffle);
  EXPECT_ERROR(parse({"-i", "x", "--shuffle=perhaps"}), "--shuffle perhaps: is neither 1 (true) nor 0 (false)");
}

// ----------------------------------------------------------------------------
// The model that they describe

TEST(ModelOptions, ChangeThePresetsShape) {
  std::optional<ModelConfig> in_folder;
  ModelOptions options = parse({"-i", "x", "-e", "d24", "--layers", "8", "--heads", "4", "--channels", "32",
                                "--vocab-size", "257", "--max-seq-len", "64", "--no-bias"})
                             .model;
  ModelConfig c = model_config(options, in_folder);
  EXPECT_FALSE(in_folder.has_value());
  EXPECT_EQ((std::vector<int>{c.num_layers, c.num_heads, c.channels, c.vocab_size, c.max_seq_len, c.bias}),
            (std::vector<int>{8, 4, 32, 257, 64, 0}));
  EXPECT_EQ(c.wiring.text, "sla(6,3)") << "the default of this shape";
  options.wiring = "gqa(2)";
  EXPECT_EQ(model_config(options, in_folder).wiring.text, "gqa(2)");
  options.heads = 5;
  EXPECT_ERROR(model_config(options, in_folder), "5 heads do not divide 32 channels");
}

TEST(ModelOptions, OfAFoldersModelChangeOnlyTheWiring) {
  const std::string folder = "dev/test/golden/adjacent";
  std::optional<ModelConfig> in_folder;
  EXPECT_EQ(model_config(parse({"-i", "x", "-e", folder, "--wiring", "plain"}).model, in_folder).wiring.text, "plain");
  ASSERT_TRUE(in_folder.has_value());
  EXPECT_EQ(in_folder->wiring.text, "sla(1,2)") << "its num_skip_layer and num_skip_head";
  for (const ShapeOption& shape : shape_options)
    EXPECT_ERROR(model_config(parse({"-i", "x", "-e", folder, shape.flag, "8"}).model, in_folder),
                 "a folder's model has its shape; leave out " + std::string(shape.flag));
  EXPECT_ERROR(model_config(parse({"-i", "x", "-e", folder, "--no-bias"}).model, in_folder), "leave out --no-bias");
}

TEST(ModelConfig, DiffersInTheFieldsThatAreNamedWithBothValues) {
  const ModelConfig config = make_config(4, 4, 32, 3, 3);
  auto difference = [&](auto change) {
    ModelConfig other = config;
    change(other);
    std::string text;
    for (const FieldDifference& d : differences(config, other)) text += d.json + (" " + d.first + " " + d.second + ";");
    EXPECT_EQ(same_model(config, other), text.empty());
    return text;
  };
  EXPECT_EQ(difference([](ModelConfig& c) { c.num_layers = 5; }), "n_layer 4 5;");
  EXPECT_EQ(difference([](ModelConfig& c) { c.num_heads = 2, c.channels = 8; }), "n_head 4 2;n_embd 32 8;");
  EXPECT_EQ(difference([](ModelConfig& c) { c.vocab_size = 7; }), "vocab_size 50257 7;");
  EXPECT_EQ(difference([](ModelConfig& c) { c.max_seq_len = 8; }), "n_positions 1024 8;");
  EXPECT_EQ(difference([](ModelConfig& c) { c.bias = false; }), "bias true false;");
  EXPECT_EQ(difference([](ModelConfig& c) { c.layer_norm_eps = 1.5e-5; }), "layer_norm_epsilon 1e-05 1.5e-05;");
  EXPECT_EQ(difference([](ModelConfig& c) { c.wiring = parse_wiring("gqa(2)"); }), "wiring sla(3,3) gqa(2);");
  EXPECT_EQ(difference([](ModelConfig& c) { c.wiring = parse_wiring(" sla( 3,3)"); }), "") << "another way to write it";
}
