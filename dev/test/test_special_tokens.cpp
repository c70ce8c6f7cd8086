// The tokens that begin, end and pad a model's texts: through training, converting and sampling, beside a vocabulary
// that has others.
// COVERS llmc/formats/config_json.cpp llmc/formats/gguf_file.cpp llmc/formats/llama_file.cpp llmc/train/training.h
// data/convert.cpp
#include "command_line.h"
#include "llmc/text/tokenizer.h"

namespace {

// A model of 260 tokens: bytes, <|endoftext|> (256), <|end|> (257) at which its turns end, <pad> (258) and "name"
// (259), which is no special one.
class SpecialTokens : public CommandLine {
 protected:
  const std::string shape = " --layers 1 --heads 2 --channels 16 --vocab-size 260 --max-seq-len 32 -t 32 -b 2 -v 0 ";

  static std::string vocabulary() {
    json j = json::parse(Tokenizer::bytes().to_json());
    for (const char* name : {"<|end|>", "<pad>", "name"}) {
      json token = j["added_tokens"][0];
      token["id"] = 256 + j["added_tokens"].size(), token["content"] = name;
      token["special"] = name != std::string("name");
      j["added_tokens"].push_back(token);
    }
    return j.dump();
  }
  // Makes the folder "model", with these keys in its config.json.
  void make_model(const json& keys, const std::string& options = "--wiring plain") const {
    write("train.bin", shard_of_documents(2000));
    const Outcome o = run(trainer + "-i " + in("train.bin") + shape + "-x 1 -o " + in("first") + " " + options);
    ASSERT_EQ(o.exit_status, 0) << o.err;
    fs::rename(in("first/step_00000001"), in("model"));
    fs::remove(in("model/state.json")), fs::remove(in("model/generation_config.json"));
    write("model/tokenizer.json", vocabulary());
    set_keys("model/config.json", keys);
  }
  void set_keys(const std::string& name, const json& keys) const {
    json config = json::parse(fs::exists(in(name)) ? read_file(in(name)) : "{}");
    config.update(keys);
    write(name, config.dump());
  }
  json read_json(const std::string& name) const { return json::parse(read_file(in(name))); }
  Outcome train(const std::string& options) const {
    return run(trainer + "-e " + in("model") + " -i " + in("train.bin") + " -t 32 -b 2 -v 0 -x 1 -o " + in("out") +
               " " + options);
  }
};

const json turns = {{"bos_token_id", 256}, {"eos_token_id", 257}, {"pad_token_id", 258}};

TEST_F(SpecialTokens, OfAModelSurviveTrainingAndConverting) {
  make_model(turns);
  ASSERT_EQ(train("").exit_status, 0);
  ASSERT_EQ(train("--tokenizer none -o " + in("numbers")).exit_status, 0);
  ASSERT_EQ(run("data/convert " + in("model") + " " + in("converted")).exit_status, 0);
  for (const char* folder : {"out/step_00000001", "numbers/step_00000001", "converted"})
    for (const auto& [key, id] : turns.items())
      for (const char* file : {"/config.json", "/generation_config.json"})
        EXPECT_EQ(read_json(std::string(folder) + file).at(key), id) << folder << file << " " << key;
  const json names = read_json("converted/tokenizer_config.json");
  EXPECT_EQ(names.at("bos_token"), "<|endoftext|>");
  EXPECT_EQ(names.at("eos_token"), "<|end|>");
  EXPECT_EQ(names.at("pad_token"), "<pad>");
}

TEST_F(SpecialTokens, OfALlamaComeAndGo) {
  make_model(turns, "--no-bias --wiring 'rmsnorm rope swiglu'");
  ASSERT_EQ(run("data/convert --llama " + in("model") + " " + in("llama")).exit_status, 0);
  ASSERT_EQ(run("data/convert " + in("llama") + " " + in("back")).exit_status, 0);
  for (const char* folder : {"llama", "back"})
    for (const auto& [key, id] : turns.items())
      for (const char* file : {"/config.json", "/generation_config.json"})
        EXPECT_EQ(read_json(std::string(folder) + file).at(key), id) << folder << file << " " << key;
}

// Hugging Face's may be lists, and generate() looks into generation_config.json alone.
TEST_F(SpecialTokens, MayEndTextsInSeveralWays) {
  make_model(turns);
  set_keys("model/config.json", {{"pad_token_id", nullptr}, {"bos_token_id", nullptr}});
  set_keys("model/generation_config.json", {{"eos_token_id", {257, 256, 99999}}});
  const Outcome o = train("");
  ASSERT_EQ(o.exit_status, 0) << o.err;
  const json config = read_json("out/step_00000001/config.json"), generation = read_json("out/step_00000001/"
                                                                                         "generation_config.json");
  EXPECT_EQ(config.at("eos_token_id"), 257);
  EXPECT_EQ(generation.at("eos_token_id"), json({257, 256})) << "the third is no token of the model";
  EXPECT_FALSE(config.contains("pad_token_id"));
  EXPECT_TRUE(config.at("bos_token_id").is_null());
  EXPECT_EQ(generation.at("pad_token_id"), 257) << "so that batches can be padded";
  set_keys("model/config.json", {{"eos_token_id", "the end"}});
  EXPECT_NE(run("data/convert " + in("model") + " " + in("converted")).err.find("\"eos_token_id\" is \"the end\""),
            std::string::npos);
}

// A model that was made without a vocabulary.
TEST_F(SpecialTokens, OfANewVocabularyWinAndALineSaysSo) {
  make_model(turns);
  fs::rename(in("model/tokenizer.json"), in("tokenizer.json"));
  const std::string line = "texts ended at token 257 (eos_token_id); the vocabulary is new to it, and they end at 256";
  const Outcome trained = train(""), converted = run("data/convert " + in("model") + " " + in("converted") +
                                                     " --tokenizer " + in("tokenizer.json"));
  for (const Outcome& o : {trained, converted}) {
    EXPECT_EQ(o.exit_status, 0) << o.err;
    EXPECT_NE(o.out.find(line), std::string::npos) << o.out;
  }
  for (const char* folder : {"out/step_00000001", "converted"})
    EXPECT_EQ(read_json(std::string(folder) + "/config.json").at("eos_token_id"), 256) << folder;
  set_keys("model/config.json", {{"eos_token_id", 256}});
  fs::remove_all(in("out"));
  EXPECT_EQ(train("").out.find("is new to it"), std::string::npos);
}

// All 260 tokens are about as likely.
TEST_F(SpecialTokens, EndSamples) {
  make_model(turns);
  std::string prompts;
  for (int i = 0; i < 400; i++) prompts += "x\n";
  write("prompts", prompts);
  auto ends = [&] {
    const Outcome o = run(alone + "build/fp32/sample_gpt2_sla_cpu " + in("model") + " --batch " + in("prompts") +
                          " -n 1 --temperature 1000 --slots 64");
    EXPECT_EQ(o.exit_status, 0) << o.err;
    int count = 0;
    for (size_t at = 0; (at = o.out.find("\"end of text\"", at)) != std::string::npos; at++) count++;
    return count;
  };
  const int two = ends();
  set_keys("model/config.json", {{"eos_token_id", {256, 257, 65, 66, 67, 68, 69, 70, 71, 72}}});
  EXPECT_GT(ends(), two) << "among 400 tokens";
  set_keys("model/config.json", {{"eos_token_id", 256}});
  EXPECT_LT(ends(), two);
}

// Documents begin at the vocabulary's end of text, whatever the model's own texts end at.
TEST_F(SpecialTokens, LeaveDocumentsToTheVocabulary) {
  make_model(turns);
  const Outcome o = train("--wiring documents");
  ASSERT_EQ(o.exit_status, 0) << o.err;
  const json config = read_json("out/step_00000001/config.json");
  EXPECT_EQ(config.at("eos_token_id"), 257);
  EXPECT_EQ(config.at("document_token_id"), 256);
  ASSERT_EQ(run("data/convert " + in("out/step_00000001") + " " + in("converted")).exit_status, 0);
  EXPECT_EQ(read_json("converted/config.json").at("document_token_id"), 256);
  // An older model of documents has the id as its end of text. Its advice can be followed.
  fs::remove_all(in("model")), fs::rename(in("converted"), in("model"));
  set_keys("model/config.json", {{"document_token_id", nullptr}});
  fs::remove_all(in("out"));
  const Outcome other = train("");
  EXPECT_EQ(other.exit_status, 1);
  EXPECT_NE(other.err.find("documents begin at token 257 by the model's config.json"), std::string::npos) << other.err;
  EXPECT_NE(other.err.find("write \"document_token_id\": 256 there"), std::string::npos) << other.err;
  set_keys("model/config.json", {{"document_token_id", 256}});
  EXPECT_EQ(train("").exit_status, 0);
}

TEST_F(SpecialTokens, AreToldFromOtherAddedOnesInFiles) {
  make_model(turns);
  ASSERT_EQ(train("").exit_status, 0);
  ASSERT_EQ(run("data/convert " + in("out/step_00000001") + " " + in("model.gguf")).exit_status, 0);
  std::set<std::string> special;
  const json vocabulary = read_json("out/step_00000001/tokenizer.json");
  for (const json& token : vocabulary.at("added_tokens"))
    if (token.at("special")) special.insert(token.at("content"));
  EXPECT_EQ(special, (std::set<std::string>{"<|endoftext|>", "<|end|>", "<pad>"}));
  const std::string gguf = read_file(in("model.gguf"));
  // The key's value: an array (9) of 260 int32 (5).
  const size_t types = gguf.find("tokenizer.ggml.token_type") + strlen("tokenizer.ggml.token_type") + 4 + 4 + 8;
  for (const auto& [id, type] : {std::pair(255, 1), {256, 3}, {257, 3}, {258, 3}, {259, 4}})
    EXPECT_EQ(int(gguf[types + 4 * size_t(id)]), type) << id;
  for (const auto& [key, id] : {std::pair("bos", 256), {"eos", 257}, {"padding", 258}}) {
    const std::string name = std::string("tokenizer.ggml.") + key + "_token_id";
    const size_t at = gguf.find(name);
    ASSERT_NE(at, std::string::npos) << key;
    EXPECT_EQ(int(uint8_t(gguf[at + name.size() + 4])) + 256 * int(gguf[at + name.size() + 5]), id) << key;
  }
}

}  // namespace
