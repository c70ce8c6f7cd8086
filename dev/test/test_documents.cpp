// The term `documents` in the programs: how long documents are, what that saves, what is refused, and what the
// evaluator says of texts that lie one after the other in a file.
// COVERS llmc/text/document_lengths.h llmc/train/training.h
#include <cmath>
#include <map>
#include "command_line.h"
#include "golden_case.h"
#include "helpers.h"
#include "llmc/model/flops.h"
#include "llmc/text/document_lengths.h"

static const std::string evaluator = "build/fp32/evaluate_gpt2_sla_cpu ";

class Documents : public CommandLine {
 protected:
  // A shard with these tokens.
  std::string shard(const std::string& name, const std::vector<int>& tokens) const {
    std::string bytes = shard_bytes(int(tokens.size()));
    for (size_t i = 0; i < tokens.size(); i++) {
      const uint16_t token = uint16_t(tokens[i]);
      memcpy(&bytes[1024 + 2 * i], &token, 2);
    }
    return write(name, bytes);
  }
};

// Tokens of 1 to 255, with an end of text, 256, at these places.
static std::vector<int> tokens_with_ends(int n, const std::vector<int>& ends) {
  std::vector<int> tokens;
  for (int i = 0; i < n; i++) tokens.push_back(1 + i * i % 255);
  for (int i : ends) tokens[size_t(i)] = 256;
  return tokens;
}

TEST_F(Documents, HaveTheirLengthsCounted) {
  shard("a.bin", tokens_with_ends(30, {0, 3, 20}));  // of 3, 17 and 10
  shard("b.bin", tokens_with_ends(12, {5, 6, 11}));  // of 5, 1, 5 and 1
  const TokenShards shards(in("*.bin"), 257);
  const DocumentLengths found = document_lengths(shards, 256, 8);
  EXPECT_EQ(found.count, 7);
  EXPECT_EQ(found.ends_of_text, 6);
  EXPECT_DOUBLE_EQ(found.mean, 6);
  EXPECT_EQ(found.median, 5);
  std::vector<double> places(8);
  for (const TokenFile& file : shards.files) {
    const std::vector<uint16_t> tokens = file.read(0, file.num_tokens);
    for (int64_t i = 0, place = 0; i < file.num_tokens; i++, place++) {
      if (tokens[size_t(i)] == 256 || i % 8 == 0) place = 0;
      places[size_t(place)] += 1.0 / 42;
    }
  }
  for (int i = 0; i < 8; i++) EXPECT_NEAR(found.places[size_t(i)], places[size_t(i)], 1e-12) << i;
}

// The pairs of each document one by one, wherever it begins: which keys these masks show depends on distances alone.
TEST_F(Documents, LeaveThePairsWithinThem) {
  const std::vector<int> lengths = {11, 7, 23, 4, 3};  // 48 tokens
  std::vector<double> places(24);
  for (int length : lengths)
    for (int place = 0; place < length; place++) places[size_t(place)] += 1.0 / 48;
  for (const char* wiring : {"documents", "documents also(1,2)", "documents window(5)", "documents strided(3)",
                             "documents topk(4)", "documents relative"}) {
    ModelConfig c = make_config(2, 4, 32, 0, 0);
    c.vocab_size = 257, c.max_seq_len = 48, c.wiring = parse_wiring(wiring);
    const AttentionPlan plan = make_attention_plan(c);
    double products = 0;
    for (int l = 0; l < 2; l++)
      for (int head = 0; head < 4; head++) {
        int begin = 0;
        for (int length : lengths) {
          for (int t = begin; t < begin + length; t++) {
            double keys = 0;
            for (int j = begin; j <= t; j++)
              keys += plan.table.mask(l, head).sees(t, j) * double(plan.table.sources(l, head).size());
            const double topk = plan.table.topk;
            products += topk > 0 ? keys + 6 * std::min(keys, topk) : (plan.table.relative ? 11 : 7) * keys;
          }
          begin += length;
        }
      }
    Segments segments;
    segments.places = &places;
    EXPECT_NEAR(flops_per_token(c, plan, 48, segments), 6 * matmul_parameters(c, plan) + 2 * 8 * products / 48, 1e-6)
        << wiring;
  }
}

TEST_F(Documents, AreToldBeforeTheRunAndInItsLog) {
  const std::string data = shard("train.bin", tokens_with_ends(2000, {0, 100, 150, 1000}));
  const std::string arguments = trainer + "-i " + data + small_model + "--wiring documents -v 0 -x 2 ";
  const Outcome dry = run(arguments + "--dry-run");
  EXPECT_EQ(dry.exit_status, 0) << dry.err;
  EXPECT_NE(dry.out.find("documents: 4 in the training data, of 500 tokens in the mean and 850 in the median; a token "
                         "takes "),
            std::string::npos)
      << dry.out;
  const Outcome o = run(arguments + "-n 2 -o " + in("out"));
  EXPECT_EQ(o.exit_status, 0) << o.err;
  const json run_line = read_log(in("out")).at(0).at("run");
  EXPECT_EQ(run_line.at("documents"), 4);
  EXPECT_EQ(run_line.at("mean_document_tokens"), 500);
  EXPECT_EQ(run_line.at("median_document_tokens"), 850);
  const json config = json::parse(read_file(in("out/step_00000002/config.json")));
  EXPECT_EQ(config.at("eos_token_id"), 256);
}

TEST_F(Documents, OfAnUnknownEndOfTextAreRefused) {
  const std::string data = shard("train.bin", tokens_with_ends(2000, {0, 100})),
                    endless = shard("endless.bin", tokens_with_ends(2000, {}));
  const std::string shape = " --layers 2 --heads 2 --channels 16 --max-seq-len 32 -t 32 -b 2 -v 0 --wiring documents ";
  expect_error("-i " + data + shape + "--vocab-size 300",
               {"wiring \"documents\": documents begin at the vocabulary's end of text", "--tokenizer"});
  expect_error("-i " + data + shape + "--vocab-size 257 --tokenizer none", {"documents", "--tokenizer"});
  expect_error("-i " + endless + shape + "--vocab-size 257",
               {"wiring \"documents\": documents begin at token 256", "endless.bin has none"});
  fs::copy("dev/test/golden/n_documents", in("model"));
  json config = json::parse(read_file(in("model/config.json")));
  config["eos_token_id"] = 101;
  write("model/config.json", config.dump());
  expect_error("-e " + in("model") + " -i " + in("model/tokens.bin"), {"config.json", "documents", "eos_token_id"});
  config.erase("eos_token_id");
  write("model/config.json", config.dump());
  expect_error("-e " + in("model") + " -i " + in("model/tokens.bin"), {"config.json", "documents", "eos_token_id"});
  // A folder that the trainer and data/convert write keeps it, without a vocabulary, too.
  for (const std::string& command : {trainer +
                                         "-e dev/test/golden/n_documents -i dev/test/golden/n_documents/tokens.bin -b "
                                         "2 -t 40 -v 0 -x 1 -n 1 -o " +
                                         in("out"),
                                     "data/convert " + in("out/step_00000001") + " " + in("converted")}) {
    const Outcome o = run(command);
    EXPECT_EQ(o.exit_status, 0) << o.err;
  }
  for (const char* folder : {"out/step_00000001", "converted"})
    EXPECT_EQ(json::parse(read_file(in(folder + std::string("/config.json")))).at("eos_token_id"), 100) << folder;
}

// In a model that knows distances alone, a text has the same losses in a file of several as in a file of its own.
TEST_F(Documents, HaveTheLossesOfEachTextAlone) {
  const std::string data = shard("train.bin", tokens_with_ends(4000, {0, 9, 100, 111, 150, 1000, 1040, 1090, 2000}));
  const std::vector<std::vector<int>> texts = {{5, 6, 7, 8, 9, 10, 11}, {70, 71}, {}, {8, 9, 10, 11, 12, 13, 14, 15}};
  std::vector<int> packed = {256};
  std::vector<std::string> files;
  for (const std::vector<int>& text : texts) {
    std::vector<int> alone = {256};
    alone.insert(alone.end(), text.begin(), text.end());
    alone.push_back(256);
    packed.insert(packed.end(), alone.begin() + 1, alone.end());
    files.push_back(shard("text" + std::to_string(files.size()) + ".bin", alone));
  }
  files.push_back(shard("packed.bin", packed));
  for (const char* wiring : {"documents rope sla(2,2)", "documents relative", "rope"}) {
    const std::string out = in("run of " + std::to_string(std::string(wiring).size()));
    const Outcome trained = run(trainer + "-i " + data + small_model + "--wiring '" + wiring +
                                "' -v 0 -x 10 -n 10 -k constant -l 3e-3 -o '" + out + "'");
    ASSERT_EQ(trained.exit_status, 0) << trained.err;
    std::map<std::string, double> nats;
    double alone = 0;
    for (const std::string& file : files) {
      const Outcome o = run(evaluator + "'" + out + "/step_00000010' " + file + " -q --json " + in("results.json"));
      ASSERT_EQ(o.exit_status, 0) << o.err;
      const json text = json::parse(read_file(in("results.json"))).at("texts").at(0);
      nats[file] = text.at("loss").get<double>() * text.at("tokens").get<double>();
      if (file != files.back()) alone += nats[file];
    }
    const double difference = std::fabs(nats[files.back()] / alone - 1);
    if (std::string(wiring) == "rope") EXPECT_GT(difference, 1e-4) << "without documents they depend on each other";
    else EXPECT_LE(difference, 1e-6) << wiring;
  }
}
