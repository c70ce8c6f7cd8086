// The program that evaluates, as users run it: against the naive reference in double, and models whose losses can be
// computed by hand.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <sstream>
#include "command_line.h"
#include "golden_case.h"
#include "helpers.h"
#include "llmc/formats/model_file.h"
#include "llmc/formats/config_json.h"
#include "llmc/model/parameters.h"
#include "dev/test/reference/reference.h"
#include "llmc/train/position_losses.h"
#include "llmc/text/choice_file.h"
#include "llmc/text/scored_text.h"

static const std::string program = "build/fp32/evaluate_gpt2_sla_cpu ", emulated = "build/fp32/evaluate_gpt2_sla_emu ";
static const std::string sampler = "build/fp32/sample_gpt2_sla_cpu ", small_vocabulary = "dev/test/tokenizer/"
                                                                                         "small.tiktoken";
static const std::string plain = "dev/test/golden/baseline";  // of bytes, context length 32
constexpr double float_error = 1e-5;

// A golden case's model in the reference.
struct ReferenceModel {
  GoldenCase golden;
  reference::Tensors<double> params;

  explicit ReferenceModel(const std::string& name)
      : golden(read_golden_case(name)), params(reference::make_parameters<double>(golden.config)) {
    for (auto& [tensor_name, tensor] : params) {
      const std::vector<float>& data = golden.model.at(tensor_name).data;
      tensor.data.assign(data.begin(), data.end());
    }
  }
  // The losses of tokens 1, 2, ... of a sequence; `likeliest`: whether each is the likeliest.
  std::vector<double> losses(const std::vector<int>& tokens, std::vector<bool>* likeliest = nullptr) const {
    const std::vector<int> inputs(tokens.begin(), tokens.end() - 1), targets(tokens.begin() + 1, tokens.end());
    reference::Cache<double> cache;
    const auto result = reference::forward(golden.config, params, inputs, targets, 1, int(inputs.size()), &cache);
    for (size_t t = 0; likeliest != nullptr && t < targets.size(); t++) {
      const auto row = cache.probs.begin() + long(t) * golden.config.vocab_size;
      likeliest->push_back(std::max_element(row, row + golden.config.vocab_size) - row == targets[t]);
    }
    return result.token_losses;
  }
  // N + R of tokens 0, 1, ... of a sequence but the last, with `act`.
  std::vector<double> ponder(const std::vector<int>& tokens) const {
    const std::vector<int> inputs(tokens.begin(), tokens.end() - 1), targets(tokens.begin() + 1, tokens.end());
    reference::Cache<double> cache;
    reference::forward(golden.config, params, inputs, targets, 1, int(inputs.size()), &cache);
    std::vector<double> ponder;
    for (size_t t = 0; t < inputs.size(); t++) ponder.push_back(cache.halting.last[t] + 1 + cache.halting.remainder[t]);
    return ponder;
  }
};

static std::string shard_of(const std::vector<int>& tokens) {
  std::string bytes = shard_bytes(int(tokens.size()));
  for (size_t i = 0; i < tokens.size(); i++) {
    const uint16_t token = uint16_t(tokens[i]);
    memcpy(&bytes[1024 + 2 * i], &token, 2);
  }
  return bytes;
}

using Pairs = std::vector<std::pair<std::string, std::string>>;

static json loglikelihood(const Pairs& pairs) { return {{"loglikelihood", json(pairs)}}; }

static std::vector<int> tokens_of(const std::vector<uint16_t>& ids) { return {ids.begin(), ids.end()}; }

class Evaluation : public CommandLine {
 protected:
  // The JSON of an evaluation that succeeds.
  json evaluate(const std::string& arguments) const {
    const Outcome o = run(program + arguments + " --json " + in("results.json"));
    EXPECT_EQ(o.exit_status, 0) << arguments << "\n" << o.err;
    return o.exit_status == 0 ? json::parse(read_file(in("results.json"))) : json();
  }
  // (tokens, loss) by position.
  std::map<int64_t, std::pair<int64_t, double>> read_positions() const {
    std::map<int64_t, std::pair<int64_t, double>> positions;
    std::istringstream lines(read_file(in("positions.csv")));
    std::string line;
    std::getline(lines, line);
    EXPECT_EQ(line, "position,tokens,loss");
    for (int64_t position, tokens; std::getline(lines, line);) {
      double loss;
      EXPECT_EQ(sscanf(line.c_str(), "%ld,%ld,%lf", &position, &tokens, &loss), 3) << line;
      positions[position] = {tokens, loss};
    }
    return positions;
  }
  // The answers of --serve.
  std::vector<json> serve(const std::string& model, const std::vector<json>& requests,
                          const std::string& program_name = program) const {
    std::string lines;
    for (const json& request : requests)
      lines += (request.is_string() ? request.get<std::string>() : request.dump()) + "\n";
    write("requests", lines);
    const Outcome o = run(program_name + model + " --serve < " + in("requests"));
    EXPECT_EQ(o.exit_status, 0) << o.err;
    std::vector<json> answers;
    std::istringstream stream(o.out);
    for (std::string line; std::getline(stream, line);) answers.push_back(json::parse(line));
    EXPECT_EQ(answers.size(), requests.size()) << o.out;
    answers.resize(requests.size());
    return answers;
  }
  // A folder with a model that reads nothing of its input: token v has the logit logits[v] everywhere.
  std::string model_of(const std::string& name, const std::vector<float>& logits, const std::string& vocabulary,
                       int context = 16) const {
    ModelConfig config;
    config.num_layers = 1, config.num_heads = 1, config.channels = 16, config.max_seq_len = context,
    config.vocab_size = int(logits.size());
    config.wiring = Wiring();
    const std::string model = in(name);
    fs::create_directory(model);
    write_file(model + "/config.json", config_json(config));
    if (!vocabulary.empty()) write_file(model + "/tokenizer.json", Tokenizer::load(vocabulary).to_json());
    const ParameterTable table = make_parameter_table(config, make_attention_plan(config, /*keep_dead=*/true));
    write_weight_file(model + "/model.safetensors", table, [&](int i, float* values) {
      std::fill(values, values + table.tensor(i).num_elements(), 0.0f);
      if (table.tensor(i).name == "ln_f.bias") values[0] = 1;  // the last hidden state is (1, 0, 0, ...)
      for (size_t v = 0; table.tensor(i).name == "wte.weight" && v < logits.size(); v++) values[v * 16] = logits[v];
    });
    return model;
  }
  void expect_error(const std::string& arguments, const std::string& part) const {
    fs::remove(in("never"));
    const Outcome o = run(program + arguments + " --json " + in("never"));
    EXPECT_EQ(o.exit_status, 1) << arguments;
    EXPECT_EQ(o.err.rfind("error: ", 0), 0u) << arguments << "\n" << o.err;
    EXPECT_NE(o.err.find(part), std::string::npos) << arguments << "\n" << o.err;
    EXPECT_EQ(o.out, "") << arguments;
    EXPECT_FALSE(fs::exists(in("never"))) << arguments;
  }
};

// The loss of each token in a model of model_of.
static std::vector<double> losses_of(const std::vector<float>& logits) {
  double sum = 0;
  for (float logit : logits) sum += std::exp(double(logit));
  std::vector<double> losses;
  for (float logit : logits) losses.push_back(std::log(sum) - double(logit));
  return losses;
}

// Logits of n tokens, all different.
static std::vector<float> different_logits(int n) {
  std::vector<float> logits;
  for (int v = 0; v < n; v++) logits.push_back(float(v * 37 % n) * 3.0f / float(n));
  return logits;
}

// ----------------------------------------------------------------------------
// Texts

TEST_F(Evaluation, HasTheLossesOfEveryGoldenCase) {
  for (const std::string& name : golden_case_names()) {
    const GoldenCase golden = read_golden_case(name);
    if (golden.config.wiring_table().memory > 0) continue;  // the next test is of those
    const json r = evaluate(golden.folder + " " + golden.folder + "/tokens.bin --context " +
                            std::to_string(golden.seq_len) + " --slots 3");
    EXPECT_NEAR(r["texts"][0]["loss"].get<double>() / golden.val_loss, 1, float_error) << name;
    EXPECT_EQ(r["texts"][0]["tokens"], golden.num_micro_batches() * golden.batch_size * golden.seq_len) << name;
  }
}

// A stream is read in one pass, however long it is, and its losses are counted by their place in a segment.
TEST_F(Evaluation, ReadsStreamsInSegmentsWithAMemory) {
  const GoldenCase golden = read_golden_case("f_memory_rope");
  const int B = golden.batch_size, T = golden.seq_len, length = golden.num_micro_batches() * T;
  std::string files;
  for (int b = 0; b < B; b++) {
    const auto first = golden.tokens.begin() + b * length;
    write(format("%d.bin", b), shard_of({first, first + length + 1}));
    files += " " + in(format("%d.bin", b));
  }
  for (const char* beside : {"tokenizer.json", "0.mask"}) {
    write(beside, "x");
    const Outcome refused = run(program + golden.folder + files + " --json " + in(beside));
    EXPECT_NE(refused.err.find("this command reads or writes it"), std::string::npos) << refused.err;
    EXPECT_EQ(read_file(in(beside)), "x");
    std::filesystem::remove(in(beside));
  }
  const Outcome o = run(program + golden.folder + files + " --json " + in("r.json") + " --positions " + in("p.csv"));
  ASSERT_EQ(o.exit_status, 0) << o.err;
  EXPECT_NE(o.err.find(format("%d tokens read", B * length)), std::string::npos) << o.err;
  const json r = json::parse(read_file(in("r.json")));
  double sum = 0;
  for (int b = 0; b < B; b++) sum += r["texts"][b]["loss"].get<double>() / B;
  EXPECT_NEAR(sum / golden.val_loss, 1, float_error);
  const PositionLosses positions = parse_positions(in("p.csv"), read_file(in("p.csv")));
  for (int t = 1; t <= T; t++) EXPECT_EQ(positions.counts[size_t(t)], B * golden.num_micro_batches()) << t;
  // Without what came before, a segment is another text.
  const json alone = evaluate(golden.folder + files + " --context " + std::to_string(T));
  EXPECT_GT(std::fabs(alone["texts"][0]["loss"].get<double>() - r["texts"][0]["loss"].get<double>()), 1e-4);
}

TEST_F(Evaluation, RunsTheKernelsOnTheEmulatedGpu) {
  const GoldenCase golden = read_golden_case("paper_default");
  write("short.bin", shard_of({golden.tokens.begin(), golden.tokens.begin() + 100}));
  const std::string arguments = golden.folder + " " + in("short.bin") + " --slots 3 --stride 20 -q";
  const Outcome gpu = run(emulated + arguments), cpu = run(program + arguments);
  EXPECT_EQ(gpu.exit_status, 0) << gpu.err;
  EXPECT_EQ(gpu.out.substr(0, gpu.out.find('.')), cpu.out.substr(0, cpu.out.find('.')));
  const json request = loglikelihood({{"abc", "de"}, {"", "x"}});
  EXPECT_NEAR(serve(golden.folder, {request}, emulated)[0]["loglikelihood"][0][0].get<double>(),
              serve(golden.folder, {request})[0]["loglikelihood"][0][0].get<double>(), 1e-3);
}

// Target t of windows of `context` inputs that begin `stride` apart is scored in the first window that has it.
TEST_F(Evaluation, HasTheReferencesLossesByPositionWithAnyStride) {
  const struct {
    int tokens, context, stride;
  } cases[] = {{100, 32, 32}, {100, 32, 1}, {100, 20, 7}, {97, 32, 16}, {98, 32, 16},
               {33, 32, 5},   {34, 32, 5},  {12, 32, 8},  {2, 32, 32},  {90, 1, 1}};
  for (const char* name : {"baseline", "paper_default"}) {
    const ReferenceModel model(name);
    for (const auto& c : cases) {
      const std::vector<int> tokens(model.golden.tokens.begin(), model.golden.tokens.begin() + c.tokens);
      std::map<int64_t, std::pair<int64_t, double>> expected;
      double sum = 0;
      for (int t = 1; t < c.tokens; t++) {
        int begin = 0;
        while (begin + c.context < t) begin += c.stride;
        const double loss = model.losses({tokens.begin() + begin, tokens.begin() + t + 1}).back();
        expected[t - begin].first++, expected[t - begin].second += loss, sum += loss;
      }
      const std::string options = " --context " + std::to_string(c.context) + " --stride " + std::to_string(c.stride);
      const json r = evaluate(model.golden.folder + " " + write("tokens.bin", shard_of(tokens)) + options +
                              " --positions " + in("positions.csv"));
      const std::string what = name + options + " of " + std::to_string(c.tokens);
      EXPECT_EQ(r["texts"][0]["tokens"], c.tokens - 1) << what;
      EXPECT_NEAR(r["texts"][0]["loss"].get<double>() / (sum / (c.tokens - 1)), 1, float_error) << what;
      const auto positions = read_positions();
      ASSERT_EQ(positions.size(), expected.size()) << what;
      for (const auto& [position, value] : expected) {
        EXPECT_EQ(positions.at(position).first, value.first) << what << " at " << position;
        EXPECT_NEAR(positions.at(position).second / (value.second / double(value.first)), 1, float_error)
            << what << " at " << position;
      }
    }
  }
}

// The ponder time of the token before each scored one: windows of 20 inputs that begin 7 apart.
TEST_F(Evaluation, HasThePonderOfTokensThatHaltByPosition) {
  const ReferenceModel model("f_act");
  const std::vector<int> tokens(model.golden.tokens.begin(), model.golden.tokens.begin() + 60);
  PositionLosses expected(20);
  double sum = 0;
  for (int t = 1; t < 60; t++) {
    int begin = 0;
    while (begin + 20 < t) begin += 7;
    const double ponder = model.ponder({tokens.begin() + begin, tokens.begin() + t + 1}).back();
    expected.add(t - begin, 0, ponder), sum += ponder;
  }
  const std::string command = model.golden.folder + " " + write("tokens.bin", shard_of(tokens)) +
                              " --context 20 --stride 7 --json " + in("r.json") + " --positions " + in("p.csv");
  const Outcome o = run(program + command);
  ASSERT_EQ(o.exit_status, 0) << o.err;
  const PositionLosses found = parse_positions(in("p.csv"), read_file(in("p.csv")));
  EXPECT_EQ(found.counts, expected.counts);
  for (size_t p = 1; p <= 20; p++) EXPECT_NEAR(found.ponder[p] / expected.ponder[p], 1, float_error) << p;
  const json r = json::parse(read_file(in("r.json")));
  for (const json& text : {r["texts"][0], r["all_texts"]})
    EXPECT_NEAR(text.at("ponder").get<double>() / (sum / 59), 1, float_error);
  EXPECT_NEAR(r["positions"][1]["ponder"].get<double>() / ((expected.ponder[2] + expected.ponder[3]) / 2), 1,
              float_error);
  for (const char* head : {" bits/byte    ponder\n", " loss    ponder\n"})
    EXPECT_NE(o.out.find(head), std::string::npos) << o.out;
  EXPECT_NE(o.out.find(format(" %9.5f\n", sum / 59)), std::string::npos) << o.out;
  EXPECT_FALSE(evaluate(plain + " " + in("tokens.bin"))["texts"][0].contains("ponder"));
}

// 10 windows of 8; 3 of them are scored: the first, the fourth and the seventh.
TEST_F(Evaluation, ScoresSomeWindowsAtEvenDistances) {
  const ReferenceModel model("baseline");
  const std::vector<int> tokens(model.golden.tokens.begin(), model.golden.tokens.begin() + 81);
  double sum = 0;
  for (int window : {0, 3, 6})
    for (double loss : model.losses({tokens.begin() + 8 * window, tokens.begin() + 8 * window + 9})) sum += loss;
  const std::string command =
      model.golden.folder + " " + write("tokens.bin", shard_of(tokens)) + " --context 8 --windows ";
  const json some = evaluate(command + "3")["texts"][0], all = evaluate(command + "11")["texts"][0];
  EXPECT_EQ(some["tokens"], 24);
  EXPECT_NEAR(some["loss"].get<double>() / (sum / 24), 1, float_error);
  EXPECT_EQ(all, evaluate(command + "0")["texts"][0]);
  EXPECT_EQ(all["tokens"], 80);
  EXPECT_NE(run(program + command + "-1").err.find("--windows -1: it cannot be negative"), std::string::npos);
}

TEST_F(Evaluation, SumsPositionsUpInRangesOfPowersOfTwo) {
  const json r = evaluate(plain + " " + write("tokens.bin", shard_bytes(70)) + " --positions " + in("positions.csv"));
  const auto positions = read_positions();
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (const json& range : r["positions"]) {
    ranges.push_back({range["first"], range["last"]});
    int64_t tokens = 0;
    double sum = 0;
    for (int64_t p = range["first"]; p <= range["last"]; p++)
      if (positions.count(p))
        tokens += positions.at(p).first, sum += double(positions.at(p).first) * positions.at(p).second;
    EXPECT_EQ(range["tokens"], tokens);
    EXPECT_NEAR(range["loss"].get<double>(), sum / double(tokens), 1e-9);
  }
  EXPECT_EQ(ranges, (std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {2, 3}, {4, 7}, {8, 15}, {16, 31}, {32, 32}}));
}

TEST_F(Evaluation, HasTheTrainersValidationLoss) {
  const std::string data = write("val.bin", shard_bytes(1000));  // 31 sequences and a rest
  const Outcome o = run(trainer + "-e dev/test/golden/paper_default -j " + data + " -x 0 -m 0 -b 4");
  double loss = 0;
  const size_t at = o.out.find("val loss ");
  ASSERT_NE(at, std::string::npos) << o.out << o.err;
  sscanf(o.out.c_str() + at, "val loss %lf", &loss);
  EXPECT_NEAR(evaluate("dev/test/golden/paper_default " + data)["texts"][0]["loss"].get<double>(), loss,
              6e-6);  // it prints five digits
}

TEST_F(Evaluation, ScoresWhatTheMaskSaysAndSaysHowManyAreRight) {
  const std::vector<float> logits = different_logits(256);
  const auto likeliest = std::max_element(logits.begin(), logits.end()) - logits.begin();
  const std::string model = model_of("model", logits, "");
  std::vector<int> tokens;
  for (int i = 0; i < 500; i++) tokens.push_back(i % 4 == 0 ? int(likeliest) : i % 256);
  const std::string shard = shard_of(tokens), data = write("masked.bin", shard);
  auto is_scored = [](int i) { return i % 3 == 0 || i > 450; };
  write("masked.mask", mask_of_shard(shard, is_scored));
  double sum = 0, scored = 0, right = 0;
  for (int i = 1; i < 500; i++)
    if (is_scored(i)) scored++, sum += losses_of(logits)[size_t(tokens[i])], right += tokens[i] == likeliest;
  const json r = evaluate(model + " " + data);
  for (const json& text : {r["texts"][0], r["all_texts"]}) {
    EXPECT_EQ(text.at("tokens"), scored);
    EXPECT_NEAR(text.at("loss").get<double>() / (sum / scored), 1, float_error);
    EXPECT_NEAR(text.at("accuracy").get<double>(), right / scored, 1e-12);
  }
  EXPECT_NE(run(program + model + " " + data).out.find("bits/byte  accuracy\n"), std::string::npos);
  const Outcome o = run(trainer + "-e " + model + " -j " + data + " -x 0 -m 0 -b 4");
  EXPECT_NE(o.out.find(format("val loss %.5f | accuracy %.1f %% after step 0 (%d tokens,", sum / scored,
                              100 * right / scored, int(scored))),
            std::string::npos)
      << o.out << o.err;
  write("masked.mask", mask_of_shard(shard, [](int i) { return i == 0; }));
  expect_error(model + " " + data, "the mask beside it leaves no token to score");
  expect_error(model + " " + in("masked.mask"), "is a mask");
}

// Tokens that stand for several bytes, parts of a character, and U+FFFD in place of what is no UTF-8.
TEST_F(Evaluation, CountsBytesOfTextNotTokens) {
  const std::string text = "The naïve café: 日本語, and the end.\n", broken = "the \xFF end";
  const Tokenizer tokenizer = Tokenizer::load(small_vocabulary);
  const std::vector<float> logits = different_logits(tokenizer.vocab_size());
  const std::vector<double> losses = losses_of(logits);
  const std::string model = model_of("model", logits, small_vocabulary);
  const struct {
    std::string text;
    int64_t bytes;
  } cases[] = {{text, int64_t(text.size())}, {broken, int64_t(broken.size()) + 2}, {"t", 1}};
  double all_nats = 0;
  int64_t all_tokens = 0, all_bytes = 0;
  std::string files;
  for (const auto& c : cases) {
    double nats = 0;
    const std::vector<uint16_t> tokens = encode_document(tokenizer, c.text);
    for (size_t i = 1; i < tokens.size(); i++) nats += losses[tokens[i]];
    const std::string file = write("text" + std::to_string(c.bytes), c.text);
    const json r = evaluate(model + " " + file)["texts"][0];
    EXPECT_EQ(r["tokens"], tokens.size() - 1);
    EXPECT_EQ(r["bytes"], c.bytes);
    EXPECT_NEAR(r["loss"].get<double>(), nats / double(tokens.size() - 1), float_error);
    EXPECT_NEAR(r["perplexity"].get<double>(), std::exp(nats / double(tokens.size() - 1)), 1e-2);
    EXPECT_NEAR(r["bits_per_byte"].get<double>(), nats / std::log(2.0) / double(c.bytes), float_error);
    all_nats += nats, all_tokens += int64_t(tokens.size()) - 1, all_bytes += c.bytes, files += " " + file;
  }
  EXPECT_LT(encode_document(tokenizer, text).size(), text.size());
  const json all = evaluate(model + files)["all_texts"];
  EXPECT_NEAR(all["loss"].get<double>(), all_nats / double(all_tokens), float_error);
  EXPECT_NEAR(all["bits_per_byte"].get<double>(), all_nats / std::log(2.0) / double(all_bytes), float_error);
}

TEST_F(Evaluation, LeavesEndsOfTextsOutOfBitsPerByte) {
  const std::vector<float> logits = different_logits(byte_vocab_size);
  const std::vector<double> losses = losses_of(logits);
  const std::string model = model_of("model", logits, "");
  const json r = evaluate(model + " " + write("tokens.bin", shard_of({256, 'a', 'b', 256, 'c'})))["texts"][0];
  const double of_bytes = losses['a'] + losses['b'] + losses['c'];
  EXPECT_EQ(r["tokens"], 4);
  EXPECT_EQ(r["bytes"], 3);
  EXPECT_NEAR(r["loss"].get<double>(), (of_bytes + losses[256]) / 4, float_error);
  EXPECT_NEAR(r["bits_per_byte"].get<double>(), of_bytes / std::log(2.0) / 3, float_error);
  const std::string validate = trainer + "-e " + model + " -j " + in("tokens.bin") + " -t 4 -b 1 -x 0 -m 0 -o ";
  EXPECT_EQ(run(validate + in("out")).exit_status, 0);
  EXPECT_NEAR(read_log(in("out")).back()["val_bits_per_byte"].get<double>(), r["bits_per_byte"].get<double>(), 1e-6);
  write("tokens.mask", mask_of_shard(shard_of({256, 'a', 'b', 256, 'c'}), [](int i) { return i != 2; }));
  const Outcome masked = run(validate + in("masked"));
  EXPECT_NE(masked.out.find(format("| %.5f bits/byte | accuracy", (losses['a'] + losses['c']) / std::log(2.0) / 2)),
            std::string::npos)
      << masked.out << masked.err;
  unlink(in("tokens.mask").c_str());
  EXPECT_EQ(evaluate(model + " " +
                     write("headerless.bin", shard_of({256, 'a', 'b', 256, 'c'}).substr(1024)))["texts"][0]["loss"],
            r["loss"]);
}

TEST_F(Evaluation, NeedsNoVocabularyForTheLossOfTokens) {
  const json r = evaluate("dev/test/golden/odd_shapes dev/test/golden/odd_shapes/tokens.bin");
  EXPECT_TRUE(r["texts"][0]["loss"].is_number());
  EXPECT_TRUE(r["texts"][0]["bytes"].is_null());
  EXPECT_TRUE(r["texts"][0]["bits_per_byte"].is_null());
}

// ----------------------------------------------------------------------------
// Multiple choice and last words

static std::vector<uint16_t> ids(const std::string& bytes) {
  std::vector<uint16_t> tokens;
  for (char c : bytes) tokens.push_back(uint8_t(c));
  return tokens;
}

// All tokens are equally likely: an answer of n tokens has n times the loss of one.
TEST_F(Evaluation, ChoosesByTheSumAndByEachNormalisation) {
  const std::string model = model_of("model", std::vector<float>(byte_vocab_size, 0.0f), "");
  // Among equal scores the first answer counts. A space in front is a token, but no character and no byte; a u with
  // dots is two tokens and bytes.
  const std::string answers[] = {" abc", " de", "\xC3\xBC\xC3\xBC\xC3\xBC", "fghi"};
  const auto accuracies = [&](int right) {
    ChoiceQuestion q = {ids("context"), {}, right};
    for (const std::string& answer : answers) q.answers.push_back(ids(answer));
    fs::remove(in("q.bin"));
    write_choice_file(in("q.bin"), {q});
    const json r = evaluate(model + " " + in("q.bin"))["choices"][0];
    return std::vector<double>{r["acc"], r["acc_per_token"], r["acc_per_character"], r["acc_per_byte"]};
  };
  // Tokens, and tokens per token, character and byte:
  EXPECT_EQ(accuracies(0), (std::vector<double>{0, 1, 0, 0}));  // 4, 1, 4/3, 4/3
  EXPECT_EQ(accuracies(1), (std::vector<double>{1, 0, 0, 0}));  // 3, 1, 3/2, 3/2
  EXPECT_EQ(accuracies(2), (std::vector<double>{0, 0, 0, 1}));  // 6, 1, 2, 1
  EXPECT_EQ(accuracies(3), (std::vector<double>{0, 0, 1, 0}));  // 4, 1, 1, 1
}

TEST_F(Evaluation, HasTheReferencesAccuracies) {
  const ReferenceModel model("paper_default");
  std::vector<ChoiceQuestion> questions;
  int right[4] = {0, 0, 0, 0}, shortened = 0;
  auto token = [&](size_t i) { return uint16_t(model.golden.tokens[i % model.golden.tokens.size()]); };
  for (int n = 0; n < 60; n++) {
    ChoiceQuestion q = {{}, {}, n * 7 % 3};
    for (int i = 0; i < 1 + n % 28; i++) q.context.push_back(token(size_t(n * 31 + i)));
    double best[4] = {};
    int chosen[4] = {};
    for (int a = 0; a < 3; a++) {
      std::vector<uint16_t> answer = {' '};
      for (int i = 0; i < 1 + (n * 5 + a * 3) % 9; i++) answer.push_back(token(size_t(n * 57 + a * 13 + i)));
      if (a == 1) answer.insert(answer.end(), {0xE2, 0x82, 0xAC});  // a character of three bytes
      std::vector<int> sequence = tokens_of(q.context);
      sequence.insert(sequence.end(), answer.begin(), answer.end());
      if (sequence.size() > 33) sequence.erase(sequence.begin(), sequence.end() - 33), shortened++;
      const std::vector<double> losses = model.losses(sequence);
      double sum = 0, characters = 0, bytes = 0;
      for (size_t i = losses.size() - answer.size(); i < losses.size(); i++) sum -= losses[i];
      for (size_t i = 1; i < answer.size(); i++)
        bytes += answer[i] < 256, characters += answer[i] < 256 && (answer[i] & 0xC0) != 0x80;
      const double scores[4] = {sum, sum / double(answer.size()), sum / std::max(1.0, characters),
                                sum / std::max(1.0, bytes)};
      for (int k = 0; k < 4; k++)
        if (a == 0 || scores[k] > best[k]) best[k] = scores[k], chosen[k] = a;
      q.answers.push_back(answer);
    }
    for (int k = 0; k < 4; k++) right[k] += chosen[k] == q.right;
    questions.push_back(q);
  }
  write_choice_file(in("q.bin"), questions);
  const json r = evaluate(model.golden.folder + " " + in("q.bin"))["choices"][0];
  EXPECT_EQ(r["questions"], 60);
  EXPECT_EQ(r["shortened"], shortened);
  EXPECT_GT(shortened, 0);
  const char* names[] = {"acc", "acc_per_token", "acc_per_character", "acc_per_byte"};
  for (int k = 0; k < 4; k++) EXPECT_NEAR(r[names[k]].get<double>(), right[k] / 60.0, 1e-9) << names[k];
}

// llm.c's numbers, written by hand: dev/data/data_common.py says what they are.
TEST_F(Evaluation, ReadsAndWritesLlmcsFormat) {
  const std::vector<ChoiceQuestion> questions = {{{10, 11}, {{20}, {30, 31}}, 1}, {{12}, {{1}, {2}, {3, 4}}, 0}};
  write_choice_file(in("q.bin"), questions);
  const std::vector<uint16_t> numbers = {65535, 26, 0, 1, 2, 2,  10, 11, 1, 20, 2, 30, 31, 65535,
                                         28,    1,  0, 3, 1, 12, 1,  1,  1, 2,  2, 3,  4};
  std::string expected(1024, '\0');
  const int32_t header[] = {20240522, 1, 2, 28};
  memcpy(&expected[0], header, sizeof header);
  expected.append(reinterpret_cast<const char*>(numbers.data()), numbers.size() * 2);
  EXPECT_EQ(read_file(in("q.bin")), expected);
  const std::vector<ChoiceQuestion> read = read_choice_file(in("q.bin"), 32);
  ASSERT_EQ(read.size(), 2u);
  for (size_t i = 0; i < 2; i++) {
    EXPECT_EQ(read[i].context, questions[i].context);
    EXPECT_EQ(read[i].answers, questions[i].answers);
    EXPECT_EQ(read[i].right, questions[i].right);
  }
}

TEST_F(Evaluation, PredictsLastWordsGreedily) {
  const Tokenizer tokenizer = Tokenizer::load(small_vocabulary);
  std::vector<float> logits = different_logits(tokenizer.vocab_size());
  Encoder encoder(tokenizer);
  std::vector<uint16_t> the, end;
  encoder.encode(" the", the);
  encoder.encode(" end", end);
  ASSERT_EQ(the.size(), 1u);
  logits[the[0]] = 6;  // the likeliest token
  const std::vector<double> losses = losses_of(logits);
  const std::string model = model_of("model", logits, small_vocabulary);
  write("words.jsonl", "{\"text\": \"one two the\"}\n{\"text\": \"one the the end\"}\n{\"text\": \"1 2 3 4 5 6 7 8 9 1 "
                       "2 3 4 5 6 7 8 9 the\"}\n");
  const json r = evaluate(model + " --lambada " + in("words.jsonl"))["last_words"][0];
  double nats = 2 * losses[the[0]];
  for (uint16_t token : end) nats += losses[token];
  EXPECT_EQ(r["texts"], 3);
  EXPECT_EQ(r["shortened"], 1);  // the context length is 16
  EXPECT_NEAR(r["acc"].get<double>(), 2.0 / 3, 1e-9);
  EXPECT_NEAR(r["perplexity"].get<double>() / std::exp(nats / 3), 1, float_error);
}

// ----------------------------------------------------------------------------
// Requests

TEST_F(Evaluation, AnswersWithTheReferencesLikelihoods) {
  const ReferenceModel model("paper_default");
  const Pairs pairs = {{"abc", "de"},
                       {"", "x"},
                       {"two  ", "words"},
                       {std::string(50, 'y') + "z", "end"},
                       {"a", std::string(31, 'b')}};
  const std::vector<json> answers = serve(model.golden.folder, {loglikelihood(pairs)});
  ASSERT_EQ(answers[0]["loglikelihood"].size(), pairs.size());
  for (size_t i = 0; i < pairs.size(); i++) {
    const auto& [context, continuation] = pairs[i];
    std::vector<int> tokens = context.empty() ? std::vector<int>{256} : tokens_of(ids(context));
    for (int token : tokens_of(ids(continuation))) tokens.push_back(token);
    if (tokens.size() > 33) tokens.erase(tokens.begin(), tokens.end() - 33);
    // White space belongs to the continuation.
    const size_t scored = continuation.size() + (context == "two  " ? 2 : 0);
    std::vector<bool> likeliest;
    const std::vector<double> losses = model.losses(tokens, &likeliest);
    double sum = 0;
    for (size_t t = losses.size() - scored; t < losses.size(); t++) sum -= losses[t];
    EXPECT_NEAR(answers[0]["loglikelihood"][i][0].get<double>() / sum, 1, float_error) << context;
    EXPECT_EQ(answers[0]["loglikelihood"][i][1].get<bool>(),
              std::count(likeliest.end() - long(scored), likeliest.end(), false) == 0)
        << context;
  }
}

TEST_F(Evaluation, SaysWhetherAContinuationIsTheLikeliest) {
  const Tokenizer tokenizer = Tokenizer::load(small_vocabulary);
  std::vector<float> logits = different_logits(tokenizer.vocab_size());
  logits[encode_document(tokenizer, " the").back()] = 6;
  const std::string model = model_of("model", logits, small_vocabulary);
  const json answer = serve(model, {loglikelihood({{"one", " the"},
                                                   {"one", " end"},
                                                   {"the", " the the the"},
                                                   {"", " the"},
                                                   {"one", " the end"},
                                                   {"one", " end the"},
                                                   {"one two", " the end the"}})})[0]["loglikelihood"];
  std::vector<bool> greedy;
  for (const json& score : answer) greedy.push_back(score[1]);
  EXPECT_EQ(greedy, (std::vector<bool>{true, false, true, true, false, false, false}));
}

// A pass has 1,024 rows: 68 sequences of 15 inputs and the first 4 inputs of another one, whose only wrong token is
// among these. All sequences are alike, so that it does not matter which one that is.
TEST_F(Evaluation, AContinuationOfTwoPassesIsTheLikeliestInBoth) {
  std::vector<float> logits(byte_vocab_size, 0.0f);
  logits['t'] = 6;
  const std::string model = model_of("model", logits, "");
  for (const auto& [continuation, is_likeliest] : {std::pair("atttttttttttttt", false), {"ttttttttttttttt", true}}) {
    const json answer = serve(model + " --slots 100", {loglikelihood(Pairs(100, {"", continuation}))})[0];
    for (const json& score : answer["loglikelihood"]) ASSERT_EQ(score[1], is_likeliest) << continuation;
  }
}

// 65,536 logits of 256 rows are what a chunk may take.
TEST_F(Evaluation, AContinuationOfSeveralLogitChunksIsComparedWithItsOwnTokens) {
  std::vector<float> logits(65536, 0.0f);
  logits['t'] = 6;
  const std::string model = model_of("model", logits, "bytes", /*context=*/600);
  std::string likeliest(599, 't'), wrong_at_300 = likeliest, wrong_at_599 = likeliest;
  wrong_at_300[300] = wrong_at_599[598] = 'a';
  const json answer = serve(model, {loglikelihood({{"x", likeliest}, {"x", wrong_at_300}, {"x", wrong_at_599}})})[0];
  std::vector<bool> greedy;
  for (const json& score : answer["loglikelihood"]) greedy.push_back(score[1]);
  EXPECT_EQ(greedy, (std::vector<bool>{true, false, false}));
}

// Texts are cut as lm-evaluation-harness does: into windows of the context length, the last one moved back until it is
// full.
TEST_F(Evaluation, AnswersWithTheLikelihoodOfLongTexts) {
  const ReferenceModel model("paper_default");
  std::string text;
  for (int i = 0; i < 75; i++) text += char('a' + i * i % 23);
  const json texts = json::array({text, text.substr(0, 32), text.substr(0, 33), "x", ""});
  const json answer = serve(model.golden.folder, {{{"loglikelihood_rolling", texts}}})[0]["loglikelihood_rolling"];
  for (size_t i = 0; i < texts.size(); i++) {
    std::vector<int> tokens = {256};
    for (char c : texts[i].get<std::string>()) tokens.push_back(c);
    double sum = 0;
    const int n = int(tokens.size());
    for (int first = 1; first < n; first += 32) {
      const int end = std::min(first + 32, n), begin = std::max(0, end - 33);
      const std::vector<double> losses = model.losses({tokens.begin() + begin, tokens.begin() + end});
      for (int t = first; t < end; t++) sum -= losses[t - begin - 1];
    }
    EXPECT_NEAR(answer[i].get<double>(), sum, std::abs(sum) * float_error) << texts[i];
  }
}

TEST_F(Evaluation, GeneratesAsTheSamplerDoes) {
  auto sampled = [&](const std::string& prompt, int n) {
    const std::string out = run(sampler + plain + " --no-end-of-text --temperature 0 -q -n " + std::to_string(n) +
                                " --batch " + write("prompt", prompt + "\n"))
                                .out;
    return json::parse(out).at("text").get<std::string>();
  };
  const std::string text = sampled("abc", 12),
                    letter = text.substr(text.find_first_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"), 1);
  const json requests =
      json::array({{{"context", "abc"}, {"max_tokens", 12}},
                   {{"context", "xyz"}, {"max_tokens", 12}},
                   {{"context", "abc"}, {"max_tokens", 12}, {"until", json::array({"never", letter})}},
                   {{"context", std::string(40, 'q') + "abc"}, {"max_tokens", 30}}});
  const json request = {{"generate_until", requests}};
  const json answer = serve(plain, {request})[0]["generate_until"];
  EXPECT_EQ(answer[0], text);
  EXPECT_EQ(answer[1], sampled("xyz", 12));
  EXPECT_EQ(answer[2], text.substr(0, text.find(letter)));
  EXPECT_EQ(answer[3], sampled("bc", 30));  // the end of the context that fits
}

TEST_F(Evaluation, AnswersWhatIsWrongWithARequest) {
  const std::vector<json> answers =
      serve(plain, {"not json",
                    {{"loglikelihood", 5}},
                    {{"sing", json::array()}},
                    loglikelihood({{"a", ""}}),
                    {{"generate_until", json::array({{{"context", "a"}, {"max_tokens", 32}}})}},
                    {{"generate_until", json::array({{{"context", "a"}, {"temperature", -1}}})}},
                    loglikelihood({{"a", std::string(40, 'b')}}),
                    {{"loglikelihood_rolling", json::array({"fine"})}}});
  const char* messages[] = {"it is no JSON: byte 2 of it",
                            "is no list",
                            "no such request",
                            "makes no token",
                            "context length is 32",
                            "--temperature -1",
                            "40 tokens are to be scored at once"};
  for (size_t i = 0; i + 1 < answers.size(); i++)
    EXPECT_NE(answers[i].value("error", "").find(messages[i]), std::string::npos) << answers[i];
  EXPECT_TRUE(answers.back().contains("loglikelihood_rolling")) << answers.back();
}

TEST_F(Evaluation, NamesTheItemThatCannotBeScored) {
  const std::vector<json> answers =
      serve(plain, {loglikelihood({{"fine", "b"}, {"a context", std::string(40, 'b')}}),
                    loglikelihood({{"fine", "b"}, {"fine", "b"}, {"nothing follows", ""}}),
                    {{"loglikelihood", json::array({json::array({"a", "b"}), json::array({"a", 5})})}},
                    {{"loglikelihood_rolling", json::array({"fine", 5})}},
                    {{"generate_until", json::array({{{"context", "fine"}, {"max_tokens", 3}},
                                                     {{"context", std::string(70, 'q')}, {"max_tokens", 32}}})}},
                    {{"generate_until", json::array({{{"context", "fine"}}, {{"context", "odd"}, {"top_p", 2}}})}},
                    loglikelihood({{"fine", std::string(32, 'b')}})});
  const std::string parts[] = {"item 2 (\"a context\"): 40 tokens are to be scored at once",
                               "item 3 (\"nothing follows\"): the continuation makes no token",
                               "item 2 (\"[\"a\",5]\"): ",
                               "item 2 (\"5\"): ",
                               "item 2 (\"" + std::string(60, 'q') + "...\"): max_tokens 32",
                               "item 2 (\"{\"context\":\"odd\",\"top_p\":2}\"): --top-p 2"};
  for (size_t i = 0; i + 1 < answers.size(); i++)
    EXPECT_EQ(answers[i].value("error", "").rfind(parts[i], 0), 0u) << answers[i];
  EXPECT_TRUE(answers.back().contains("loglikelihood")) << "as many tokens as the context has: " << answers.back();
}

// ----------------------------------------------------------------------------
// Vocabularies, and globs

// The padded tokens are likelier than all others.
TEST_F(Evaluation, TokensBeyondTheVocabularyAreNotDrawn) {
  std::vector<float> logits(300, 0.0f);
  logits['t'] = 6, logits[290] = 12;
  const std::string model = model_of("model", logits, "bytes");
  EXPECT_EQ(run(sampler + model + " --prompt a -n 4 --temperature 0 -q").out, "atttt\n");
  const json answer = serve(model, {{{"generate_until", json::array({{{"context", "a"}, {"max_tokens", 4}}})}}})[0];
  EXPECT_EQ(answer["generate_until"][0], "tttt");
  const Outcome o = run(trainer + "-e " + model + " -x 0 -s 1 -g 6 -b 1 --prompt a --temperature 0");
  EXPECT_NE(o.out.find("\natttt\n---"), std::string::npos) << o.out;
}

TEST_F(Evaluation, RefusesTokensOfAnotherVocabulary) {
  const std::string model = model_of("model", different_logits(657), small_vocabulary);
  fs::create_directory(in("data"));
  for (const char* name : {"data/t.bin", "data/q.bin"}) write(name, shard_bytes(50));
  fs::remove(in("data/q.bin"));
  write_choice_file(in("data/q.bin"), {{{1, 2}, {{3}, {4, 5}}, 1}});
  EXPECT_EQ(evaluate(model + " " + in("data/t.bin"))["texts"].size(), 1u);
  write("data/tokenizer.json", Tokenizer::bytes().to_json());
  for (const char* file : {"data/t.bin", "data/q.bin"})
    expect_error(model + " " + in(file), "tokenizer.json are different vocabularies");
  expect_error(model + " " + write("text", "a text") + " --tokenizer bytes", "are different vocabularies");
  expect_error(model + " " + in("text") + " --tokenizer none", "--tokenizer none: without a vocabulary");
  const json r = evaluate(model + " --tokenizer none " + in("data/t.bin"));
  EXPECT_TRUE(r["texts"][0]["bits_per_byte"].is_null());
  EXPECT_NE(run(sampler + model + " --tokenizer bytes").err.find("are different vocabularies"), std::string::npos);
  EXPECT_NE(run("data/convert " + model + " " + in("out") + " --tokenizer bytes")
                .err.find("are different vocabularies"),
            std::string::npos);
  EXPECT_FALSE(fs::exists(in("out")));
  fs::remove(model + "/tokenizer.json");  // the data's is the model's then
  EXPECT_FALSE(evaluate(model + " " + in("data/t.bin"))["texts"][0]["bits_per_byte"].is_null());
}

TEST_F(Evaluation, TakesGlobsAndFoldersNamedLikeThem) {
  fs::create_directories(in("data[1]"));
  for (const char* name : {"data[1]/val_0.bin", "data[1]/val_1.bin", "data[1]/train.bin"}) write(name, shard_bytes(50));
  write("data[1]/[w].jsonl", "{\"text\": \"one two\"}\n");
  const json r = evaluate(plain + " '" + in("data[1]/val_*.bin") + "' '" + in("data[1]/train.bin") + "' --lambada '" +
                          in("data[1]/*.jsonl") + "'");
  ASSERT_EQ(r["texts"].size(), 3u);
  EXPECT_EQ(r["texts"][1]["file"], in("data[1]/val_1.bin"));
  EXPECT_EQ(r["last_words"].size(), 1u);
  expect_error(plain + " '" + in("data[1]/test_*.bin") + "'", "test_*.bin: cannot be read: there is no such file");
}

// The embedding of position 10 is NaN: shorter texts can be read.
TEST_F(Evaluation, AnErrorLosesNothingThatWasComputedBefore) {
  std::vector<float> logits(byte_vocab_size, 0.0f);
  logits['t'] = 6;
  const std::string model = model_of("model", logits, "");
  std::string weights = read_file(model + "/model.safetensors");
  uint64_t head = 0;
  memcpy(&head, weights.data(), sizeof head);
  const size_t at = json::parse(weights.substr(8, head)).at("wpe.weight").at("data_offsets").at(0);
  const float nan = NAN;
  memcpy(&weights[8 + head + at + 4 * 16 * 10], &nan, sizeof nan);
  write_file(model + "/model.safetensors", weights);

  const std::string short_text = write("short", "tttt"), long_text = write("long", std::string(12, 't'));
  const Outcome evaluated = run(program + model + " " + short_text + " " + long_text + " --json " + in("never"));
  EXPECT_EQ(evaluated.exit_status, 1);
  EXPECT_NE(evaluated.out.find(short_text + " "), std::string::npos) << evaluated.out;
  EXPECT_EQ(evaluated.out.find("nan"), std::string::npos) << evaluated.out;
  EXPECT_EQ(evaluated.err.rfind("error: " + long_text + ": the loss of a token is not finite", 0), 0u) << evaluated.err;
  EXPECT_FALSE(fs::exists(in("never"))) << "half a result";

  const Outcome full = run(program + model + " " + short_text + " --json /dev/full --positions " + in("p.csv"));
  EXPECT_EQ(full.exit_status, 1);
  EXPECT_EQ(read_file(in("p.csv")).rfind("position,tokens,loss\n1,1,", 0), 0u) << full.err;

  const Outcome sampled = run(sampler + model + " -n 3 --temperature 0 --slots 2 --batch " +
                              write("lines", "a\nb\nc\n" + std::string(12, 'd') + "\n"));
  EXPECT_EQ(sampled.exit_status, 1);
  std::vector<std::string> ends;
  std::istringstream lines(sampled.out);
  for (std::string line; std::getline(lines, line);) ends.push_back(json::parse(line).at("ended_by"));
  EXPECT_EQ(ends, (std::vector<std::string>{"number of tokens", "number of tokens", "error", "error"})) << sampled.out;
  EXPECT_NE(sampled.err.find("no sample can be drawn"), std::string::npos) << sampled.err;
}

// ----------------------------------------------------------------------------
// The files that are fetched

static const std::string two_questions = "{\"ind\": 4, \"ctx_a\": \"One\", \"ctx_b\": \"two\", \"ctx\": \"One two\", "
                                         "\"label\": 1, \"endings\": [\"a.\", \"bc.\", \"d\", \"e\"]}\n"
                                         "{\"ctx\": \"na\u00EFve\", \"label\": 0, \"endings\": [\"f\", \"\u00E9\", "
                                         "\"g\", \"h\"]}\n";

TEST_F(Evaluation, ConvertsQuestionsAsLlmcDoes) {
  const std::string convert = "data/convert " + write("q.jsonl", two_questions) + " " + in("q.bin") + " --tokenizer ";
  ASSERT_EQ(run(convert + "bytes").exit_status, 0);
  const std::vector<ChoiceQuestion> questions = read_choice_file(in("q.bin"), byte_vocab_size);
  ASSERT_EQ(questions.size(), 2u);
  EXPECT_EQ(questions[0].context, ids("One two"));
  EXPECT_EQ(questions[0].answers, (std::vector<std::vector<uint16_t>>{ids(" a."), ids(" bc."), ids(" d"), ids(" e")}));
  EXPECT_EQ(questions[0].right, 1);
  EXPECT_EQ(questions[1].context, ids("na\xC3\xAFve"));
  EXPECT_EQ(questions[1].answers[1], ids(" \xC3\xA9"));
  EXPECT_NE(run(convert + "bytes").err.find("exists already"), std::string::npos);
  fs::remove(in("q.bin"));
  ASSERT_EQ(run(convert + small_vocabulary).exit_status, 0);
  const Tokenizer tokenizer = Tokenizer::load(small_vocabulary);
  const std::vector<uint16_t> context = read_choice_file(in("q.bin"), tokenizer.vocab_size())[0].context;
  std::string text;
  for (uint16_t token : context) text += tokenizer.token(token);
  EXPECT_EQ(text, "One two");
  EXPECT_LT(context.size(), 7u);
  for (const char* line :
       {"no JSON", "{\"ctx\": \"a\", \"label\": 2, \"endings\": [\"b\", \"c\"]}", "{\"ctx\": \"a\", \"label\": 0}",
        "{\"ctx\": \"\", \"label\": 0, \"endings\": [\"b\", \"c\"]}"}) {
    const Outcome o = run("data/convert " + write("bad.jsonl", two_questions + line + "\n") + " " + in("bad.bin") +
                          " --tokenizer bytes");
    EXPECT_EQ(o.exit_status, 1) << line;
    EXPECT_NE(o.err.find("line 3 is no question of HellaSwag"), std::string::npos) << o.err;
    EXPECT_FALSE(fs::exists(in("bad.bin")));
  }
}

TEST_F(Evaluation, ScriptsCheckWhatTheyFetch) {
  const std::string data = in("root/data");
  fs::create_directories(data + "/.download");
  for (const char* name : {"common.sh", "hellaswag.sh", "lambada.sh", "convert"})
    fs::copy_file(std::string("data/") + name, data + "/" + name);
  write("q.jsonl", two_questions);
  const std::string hellaswag = "TOKENIZER=bytes HELLASWAG_URL=file://" + in("q.jsonl") + " " + data + "/hellaswag.sh";
  Outcome o = run(hellaswag);
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("with another checksum than expected"), std::string::npos) << o.err;
  // The file is as an interrupted run leaves it when it has been checked.
  write_file(data + "/.download/hellaswag_val.jsonl", two_questions);
  o = run(hellaswag);
  EXPECT_EQ(o.out, data + "/hellaswag/hellaswag_val.bin\n") << o.err;
  EXPECT_EQ(read_choice_file(data + "/hellaswag/hellaswag_val.bin", byte_vocab_size).size(), 2u);
  EXPECT_TRUE(names_in(data + "/.download").empty());
  EXPECT_NE(run(hellaswag).err.find("exists already"), std::string::npos);
  o = run("LAMBADA_URL=file://" + in("q.jsonl") + " " + data + "/lambada.sh");
  EXPECT_EQ(o.exit_status, 1);
  EXPECT_NE(o.err.find("with another checksum than expected"), std::string::npos) << o.err;
  EXPECT_FALSE(fs::exists(data + "/lambada/lambada_test.jsonl"));
}

// ----------------------------------------------------------------------------
// What cannot be

TEST_F(Evaluation, RefusesWhatCannotBe) {
  const std::string tokens = write("tokens.bin", shard_bytes(50)), text = write("text.txt", "some text");
  write_choice_file(in("q.bin"), {{{1, 2}, {{3}, {4, 5}}, 1}, {{6}, {{7}, {8}}, 0}});
  const std::string good = read_file(in("q.bin"));
  auto questions = [&](const std::string& name, std::string bytes, size_t number = 0, uint16_t value = 0) {
    if (number > 0) memcpy(&bytes[1024 + 2 * (number - 1)], &value, 2);
    return plain + " " + write(name, bytes);
  };
  std::string version = good;
  version[4] = 9;
  const struct {
    std::string arguments, message;
  } cases[] = {{"", "MODEL"},
               {plain, "name a file to evaluate"},
               {plain + " --serve " + text, "--serve takes no files"},
               {in("nowhere") + " " + text, "config.json: cannot be read"},
               {"dev/test/golden/odd_shapes " + text, "has no vocabulary"},
               {"dev/test/golden/odd_shapes --serve", "has no vocabulary"},
               {plain + " " + in("missing"), "cannot be read"},
               {plain + " " + write("empty", ""), "is empty: there is nothing to predict"},
               {plain + " " + write("one.bin", shard_of({5})), "has one token"},
               {plain + " " + write("beyond.bin", shard_of({5, 300})), "token 300 at position 1 is outside the "
                                                                       "vocabulary of 257"},
               {plain + " " + write("short.bin", shard_bytes(50).substr(0, 1100)), "truncated"},
               {plain + " " + text + " --context 33", "the model's context length is 32"},
               {plain + " " + text + " --context 16 --stride 17", "it must be at most the context, 16"},
               {plain + " " + text + " --stride -1", "cannot be negative"},
               {plain + " " + text + " --slots 0", "--slots 0"},
               {questions("q1", good.substr(0, good.size() - 2)), "question 1: the file ends in it: it is truncated"},
               {questions("q2", good.substr(0, 1000)), "it is truncated or empty"},
               {questions("q3", good + "ab"), "longer than its 2 questions"},
               {questions("q4", version), "version 9"},
               {questions("q5", good, 1, 1), "question 0: it does not begin with 65535"},
               {questions("q6", good, 2, 24), "it says 24 bytes, but has 26"},
               {questions("q7", good, 3, 1), "it says that it is question 1"},
               {questions("q8", good, 4, 2), "the right one is 2, counted from 0"},
               {questions("q9", good, 6, 0), "its context has no token"},
               {questions("q10", good, 7, 257), "token 257 of its context is outside the model's vocabulary of 257"},
               {plain + " " + write("magic.bin", "\x0F" + good.substr(1)),
                "token 55311 at position 0 is outside"},  // headerless tokens, by its name
               {plain + " " + write("magic", "\x0F" + good.substr(1)), "is no text: it has bytes of zero"},
               {plain + " --lambada " + write("w1", "{\"text\": 5}\n"), "line 1 is no JSON object with a text"},
               {plain + " --lambada " + write("w2", "{\"text\": \"a b\"}\n\n{\"text\": \"word\"}\n"), "line 3: "
                                                                                                      "\"word\" has no "
                                                                                                      "last word"},
               {plain + " --lambada " + write("w3", ""), "has no line"},
               {plain + " --positions " + in("p") + " --lambada " + write("w5", "{\"text\": \"a b\"}\n"), "only texts"},
               {plain + " --lambada " + write("w4", "{\"text\": \"a " + std::string(40, 'b') + "\"}\n"), "predicted "
                                                                                                         "has 41 "
                                                                                                         "tokens"}};
  for (const auto& c : cases) expect_error(c.arguments, c.message);
}

TEST_F(Evaluation, SaysThatWeightsAreNaN) {
  std::vector<float> logits(byte_vocab_size, 0.0f);
  logits[7] = NAN;
  const std::string model = model_of("model", logits, "");
  expect_error(model + " " + write("text", "some text"), "is not finite");
  write_choice_file(in("q.bin"), {{{1, 2}, {{3}, {4, 5}}, 1}});
  expect_error(model + " " + in("q.bin"), "is not finite");
  EXPECT_NE(serve(model, {loglikelihood({{"a", "b"}})})[0].value("error", "").find("is not finite"), std::string::npos);
}
