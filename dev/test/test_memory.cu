// What long contexts rest on: the plan says what the program takes, and what it takes grows with T and not with T * T.
// By plan for GPT-2's sizes; by what the emulated GPU has handed out for small models. And what is modelled of a step's
// time from that plan.
//
// COVERS train_gpt2_sla.cu llmc/cuda/device.h llmc/model/activations.h llmc/train/largest_micro_batch.h
// llmc/base/memory_plan.h
#define SLA_NO_MAIN
#include "train_gpt2_sla.cu"

#include <gtest/gtest.h>
#include "dev/bench/gpu_model.h"
#include "dev/bench/tables.h"
#include "dev/test/helpers.h"
#include "llmc/train/training.h"

static const std::vector<int> lengths = {4096, 8192, 16384, 32768, 65536};

static ModelConfig preset(const char* name, int positions) {
  ModelConfig config;
  CHECK(config_from_preset(name, config));
  config.max_seq_len = positions;
  return config;
}

static ModelConfig small_config(int positions) {
  ModelConfig config = make_config(4, 4, 32, 3, 3);
  config.vocab_size = 257, config.max_seq_len = positions;
  return config;
}

// All of the arena but the logits, in bytes.
static double activation_bytes(const GPT2& model) {
  return double(model.activations.layout.bytes - model.memory_plan[MemoryGroup::logits]);
}

static std::string describe(const GPT2& model) {
  return format("%d layers, %d channels, %s, B %d, T %d, recompute level %d", model.config.num_layers,
                model.config.channels, model.config.wiring.text.c_str(), model.training->B, model.training->T,
                int(model.training->recompute));
}

// Bytes that the program holds on the device at this moment, its workspaces among them, and the most since
// forget_most_bytes_allocated().
static double allocated() {
  gpu();
  return double(emu::counters().bytes_allocated);
}
static double most_allocated() { return double(emu::counters().most_bytes_allocated); }

// ----------------------------------------------------------------------------
// The plan and what is taken

TEST(MemoryPlan, SaysWhatTheWorkspacesTake) { EXPECT_EQ(allocated(), double(device_workspace_bytes())); }

// Small weights and long sequences, so that no activation is a small part of what is taken.
struct Shape {
  ModelConfig config;
  int B, T;
};
static std::vector<Shape> shapes(int T) {
  ModelConfig adjacent = make_config(4, 2, 16, 1, 1), plain = make_config(2, 4, 32, 0, 0),
              without_bias = make_config(6, 2, 16, 4, 2);
  adjacent.vocab_size = 101, plain.vocab_size = 257, without_bias.vocab_size = 1000, without_bias.bias = false;
  return {{adjacent, 1, T}, {plain, 2, T / 2 + 3}, {without_bias, 3, T / 3}};
}

TEST(MemoryPlan, SaysWhatAModelTakes) {
  for (const Shape& shape : shapes(1024)) {
    for (int recompute = 0; recompute <= 4; recompute++) {
      GPT2 model;
      gpt2_declare(model, shape.config, {shape.B, shape.T, Recompute(recompute)});
      const double before = allocated(), planned = double(model.memory_plan.total() - device_workspace_bytes());
      gpt2_allocate(model);
      EXPECT_NEAR((allocated() - before) / planned, 1, 0.03) << describe(model);
    }
  }
}

TEST(MemoryPlan, SaysWhatAModelTakesAtMostDuringAStep) {
  for (const Shape& shape : shapes(96)) {
    for (int recompute = 0; recompute <= 4; recompute++) {
      GPT2 model;
      gpt2_declare(model, shape.config, {shape.B, shape.T, Recompute(recompute)});
      const double before = allocated(), planned = double(model.memory_plan.total() - device_workspace_bytes());
      gpt2_allocate(model);
      init_weights(model, 1);
      emu::forget_most_bytes_allocated();
      const std::vector<int> tokens(size_t(shape.B * shape.T), 7);
      gpt2_zero_grad(model);
      for (int i = 0; i < 3; i++)  // eager, captured, replayed
        gpt2_micro_step(model, tokens.data(), tokens.data(), shape.B, shape.T, 3);
      gpt2_update(model, 1, {1e-4, 0.9, 0.95, 1e-8, 0.1, 1.0});
      gpt2_read_stats(model);
      CUDA_CHECK(cudaDeviceSynchronize());
      EXPECT_LE((most_allocated() - before) / planned, 1.03) << describe(model);
    }
  }
}

TEST(MemoryPlan, OfARankHasItsShareOfMastersAndMoments) {
  const ModelConfig config = shapes(64)[2].config;
  for (bool muon : {false, true}) {
    PlanOptions plan = {1, 64};
    plan.muon = muon;
    GPT2 whole;
    gpt2_declare(whole, config, plan);
    const double parameters = double(whole.parameters.num_parameters), states = has_master_weights ? 3 : 2;
    double before = allocated();
    gpt2_allocate(whole);
    const double whole_bytes = allocated() - before;
    for (int ranks : {2, 4, 7}) {
      SCOPED_TRACE(format("%d ranks%s", ranks, muon ? ", Muon" : ""));
      plan.shard = {ranks - 1, ranks, muon};
      GPT2 shard;
      gpt2_declare(shard, config, plan);
      before = allocated();
      gpt2_allocate(shard);
      // Padding that lets buckets be cut into shards, or what does not come out even where matrices are whole.
      const double saved = states * 4 * parameters * (1 - 1.0 / ranks), padding = 1.25;
      EXPECT_NEAR((double(whole.memory_plan.total()) - double(shard.memory_plan.total())) / saved, 1, padding - 1);
      EXPECT_GT(whole_bytes - (allocated() - before), (2 - padding) * saved);
      EXPECT_LE(double(shard.state_bytes()) / (4 * parameters / ranks), padding);
    }
  }
}

TEST(MemoryPlan, OfTheCheckpointCopyHasMomentsAndRank0sWeights) {
  auto arenas_copied = [](int rank, Shard shard) {  // in arenas of all parameters
    Trainer t;
    t.run.options.out = "out";
    t.run.ranks.rank = rank;
    t.run.B = 1, t.run.T = 64;
    gpt2_declare(t.model, small_config(64), {1, 64, Recompute::nothing, false, shard});
    allocate(t);
    EXPECT_EQ(t.checkpoint_copy.size * sizeof(float), checkpoint_copy_bytes(t.model, rank));
    return double(checkpoint_copy_bytes(t.model, rank)) / double(t.model.parameters.layout.bytes);
  };
  EXPECT_EQ(arenas_copied(0, {}), 3);
  EXPECT_EQ(arenas_copied(0, {0, 4}), 1 + 2.0 / 4);
  EXPECT_EQ(arenas_copied(3, {3, 4}), 2.0 / 4);
  EXPECT_EQ(arenas_copied(3, {}), 0) << "with --zero 0 rank 0 has it all";
}

TEST(MemoryPlan, IsOfMemoryThatComesBack) {
  const double before = allocated();
  {
    GPT2 model;
    gpt2_declare(model, small_config(64), {2, 64});
    gpt2_allocate(model);
    EXPECT_GT(allocated(), before);
  }
  EXPECT_EQ(allocated(), before);
}

// ----------------------------------------------------------------------------
// Long contexts

TEST(LongContexts, TakeActivationsInProportionToLengthByPlan) {
  for (const char* name : {"d12", "d24", "d36"}) {
    for (int recompute = 0; recompute <= 4; recompute++) {
      double a_token = 0;
      for (int T : lengths) {
        GPT2 model;
        gpt2_declare(model, preset(name, T), {1, T, Recompute(recompute)});
        SCOPED_TRACE(describe(model));
        if (a_token == 0) a_token = activation_bytes(model) / T;
        EXPECT_NEAR(activation_bytes(model) / T / a_token, 1, 0.01);
        EXPECT_LE(model.memory_plan[MemoryGroup::logits],
                  size_t(logit_chunk_bytes()) + guard_bytes + ArenaLayout::alignment);
      }
    }
  }
}

TEST(LongContexts, TakeActivationsInProportionToLengthOnTheDevice) {
  for (int recompute = 0; recompute <= 4; recompute++) {
    double a_token = 0;
    for (int T : lengths) {
      GPT2 model;
      gpt2_declare(model, small_config(lengths.back()), {1, T, Recompute(recompute)});
      SCOPED_TRACE(describe(model));
      const double before = allocated();
      gpt2_allocate(model);
      const double parameters =
          double(model.memory_plan.total() - model.activations.layout.bytes - device_workspace_bytes());
      const double taken = allocated() - before - parameters - double(model.memory_plan[MemoryGroup::logits]);
      if (a_token == 0) a_token = taken / T;
      EXPECT_NEAR(taken / T / a_token, 1, 0.01);
    }
  }
}

TEST(LongContexts, HaveNoTensorThatGrowsFasterThanLength) {
  for (const char* name : {"d12", "d24", "d36"}) {
    for (int recompute = 0; recompute <= 4; recompute++) {
      for (size_t i = 0; i + 1 < lengths.size(); i++) {
        GPT2 model, longer;
        gpt2_declare(model, preset(name, lengths[i]), {1, lengths[i], Recompute(recompute)});
        gpt2_declare(longer, preset(name, lengths[i + 1]), {1, lengths[i + 1], Recompute(recompute)});
        const double growth = double(lengths[i + 1]) / lengths[i];
        ASSERT_EQ(model.activations.layout.tensors.size(), longer.activations.layout.tensors.size());
        for (size_t t = 0; t < model.activations.layout.tensors.size(); t++) {
          const TensorSpec& tensor = model.activations.layout.tensors[t];
          EXPECT_LE(double(longer.activations.layout.tensors[t].bytes()), growth * double(tensor.bytes()))
              << tensor.name << ", " << describe(longer);
        }
      }
    }
  }
}

// An operation that took memory for T * T scores, if only while it runs, would take more per token of the longer
// sequence.
TEST(LongContexts, TakeNothingQuadraticDuringAStep) {
  std::vector<double> a_token;
  for (int T : {64, 256}) {
    GPT2 model;
    gpt2_declare(model, small_config(256), {1, T});
    gpt2_allocate(model);
    const double before = allocated();
    emu::forget_most_bytes_allocated();
    const std::vector<int> tokens(size_t(T), 7);
    gpt2_micro_step(model, tokens.data(), tokens.data(), 1, T, 1);
    CUDA_CHECK(cudaDeviceSynchronize());
    a_token.push_back((most_allocated() - before) / T);
  }
  EXPECT_LE(a_token[1], a_token[0]);
}

TEST(LongContexts, Of64kTokensOf124MFitInto32Gb) {
  const ModelConfig config = preset("d12", 65536);
  ASSERT_EQ(config.wiring.text, "sla(9,9)");
  for (int recompute = 0; recompute <= 4; recompute++) {
    GPT2 model;
    gpt2_declare(model, config, {1, 65536, Recompute(recompute)});
    EXPECT_LE(double(model.memory_plan.total()), 32e9) << describe(model);
  }
}

TEST(LongContexts, TakeLessAtEachLevelOfRecomputation) {
  for (const char* name : {"d12", "d24", "d36"}) {
    for (int T : lengths) {
      size_t level_below = SIZE_MAX;
      for (int recompute = 0; recompute <= 4; recompute++) {
        GPT2 model;
        gpt2_declare(model, preset(name, T), {1, T, Recompute(recompute)});
        EXPECT_LT(model.memory_plan.total(), level_below) << describe(model);
        level_below = model.memory_plan.total();
      }
    }
  }
}

// ----------------------------------------------------------------------------
// Chunks of logits

// The chunks of 124M, whose rows have 100,608 bytes, by micro-batch, T and the GPU's memory in GB.
TEST(LogitChunks, AreFewAndEqualInWholeTiles) {
  const ModelConfig config = preset("d12", 4096);
  const auto rows = [&](int B, int T, int gb) {
    PlanOptions plan = {B, T};
    plan.logit_bytes = logit_chunk_bytes(size_t(gb) * 1000000000);
    GPT2 model;
    gpt2_declare(model, config, plan);
    EXPECT_LE(model.memory_plan[MemoryGroup::logits],
              size_t(model.logit_rows) * 100608 + guard_bytes + ArenaLayout::alignment);
    return model.logit_rows;
  };
  EXPECT_EQ(rows(16, 1024, 80), 8192) << "two chunks, of at most 10,496 rows";
  EXPECT_EQ(rows(10, 1024, 80), 10240) << "one";
  EXPECT_EQ(rows(41, 256, 80), 10496) << "one, the largest";
  EXPECT_EQ(rows(42, 256, 80), 5376);
  EXPECT_EQ(rows(3, 3501, 80), 5376) << "10,503 rows: the second chunk has fewer";
  EXPECT_EQ(rows(16, 1024, 16), 4096) << "of 500 MB: at most 4,864 rows";
  EXPECT_EQ(rows(3, 33, 80), 99) << "no more than there are";
  EXPECT_EQ(rows(1, 1, 80), 1);
  EXPECT_EQ(rows(16, 1024, 0), 256) << "at least a tile's";
}

// ----------------------------------------------------------------------------
// The largest micro-batch

TEST(LargestMicroBatch, IsTheLastOneWhosePlanFits) {
  // The chunk of logits outweighs the sequences, and its bytes go up and down with B.
  ModelConfig wide_vocabulary = small_config(64);
  wide_vocabulary.vocab_size = 50257;  // 12 sequences are a chunk of 768 rows, 13 are two of 512
  for (const ModelConfig& config : {small_config(64), wide_vocabulary}) {
    for (int recompute : {0, 3}) {
      PlanOptions plan = {1, 64, Recompute(recompute)};
      plan.logit_bytes = 80 << 20;
      std::vector<size_t> bytes = {0};  // by B
      for (int B = 1; B <= 200; B++) bytes.push_back(gpt2_memory_plan(config, B, plan).total());
      EXPECT_EQ(bytes[12] > bytes[13], config.vocab_size == 50257);
      // Just enough for so many, and just not; 200 sequences are too many for either, whatever the logits.
      for (size_t sequences = 1; sequences <= 20; sequences++) {
        for (size_t budget : {bytes[sequences] - 1, bytes[sequences]}) {
          int expected = 0;
          for (int B = 1; B <= 200; B++)
            if (bytes[B] <= budget) expected = B;
          EXPECT_EQ(largest_micro_batch(budget, config, plan), expected) << budget << " bytes";
        }
      }
    }
  }
}

TEST(LargestMicroBatch, IsNoneThatTheKernelsDoNotTake) {
  const size_t memory = size_t(1) << 50;
  ModelConfig config = make_config(1, 1, 8, 0, 0);
  config.vocab_size = 64, config.max_seq_len = 1 << 20;
  EXPECT_EQ(largest_micro_batch(memory, config, {1, 8}), 65535) << "the largest y of a grid";
  EXPECT_EQ(largest_micro_batch(memory, config, {1, 1 << 20}), 2047) << "rows of 31 bits";
  config.wiring = parse_wiring("memory(1048576) rope");
  EXPECT_EQ(largest_micro_batch(memory, config, {1, 1 << 20}), 1023);
  GPT2 model;
  EXPECT_ERROR(gpt2_declare(model, config, {65536, 8}), "65536 sequences of 8 tokens in a micro-batch: at most 2047");
  config.wiring = parse_wiring("plain");
  EXPECT_ERROR(gpt2_declare(model, config, {65536, 8}), "at most 65535 here; take a smaller -b");
  EXPECT_EQ(largest_batch_on(size_t(80) << 30, config, 8, Recompute::nothing),
            largest_micro_batch((size_t(80) << 30) - device_reserve_bytes(), config, {1, 8}));
}

// Where dS goes through memory. A stream's first segment has no keys before it, so that it may take that way where the
// others do not, and its chunks may have more sequences.
TEST(AttentionScratch, IsEnoughForAStreamsFirstSegment) {
  const AttentionBy by = gpu().attention_by;
  gpu().attention_by = AttentionBy::candidates_ds;
  for (const auto& [memory, B] : {std::pair(4096, 1), {512, 10}}) {
    ModelConfig config = preset("d12", 1024);
    config.wiring = parse_wiring(format("memory(%d) rope", memory));
    GPT2 model;
    gpt2_declare(model, config, {B, 1024});
    const int64_t needed = attention_backward_scratch(B, 1024, 64, 12);
    EXPECT_GT(needed, attention_backward_scratch(B, memory + 1024, 64, 12));
    const auto& tensors = model.activations.layout.tensors;
    const auto scratch = std::find_if(tensors.begin(), tensors.end(),
                                      [](const TensorSpec& tensor) { return tensor.name == "attention_scratch"; });
    ASSERT_NE(scratch, tensors.end());
    EXPECT_EQ(scratch->shape, std::vector<int64_t>{needed});
  }
  gpu().attention_by = by;
}

// ----------------------------------------------------------------------------
// The time of a step, modelled (dev/bench/gpu_model.h)

struct ModelledModel {
  ModelConfig config;
  AttentionPlan plan;
  std::vector<ModelledOperation> step;
  double tokens;

  ModelledModel(const char* wiring, int B, int T, Recompute recompute = Recompute::nothing,
                const GpuSpec& gpu = h100_sxm(), const Segments& segments = {})
      : tokens(double(B) * T) {
    config = preset("d12", std::max(1024, T));
    config.wiring = parse_wiring(wiring);
    GPT2 model;
    gpt2_declare(model, config, {B, T, recompute});
    plan = model.attention_plan;
    step = modelled_step(gpu, model, segments);
  }
  double attention_seconds() const {
    return sum([](const ModelledOperation& operation, const ModelledPart& part) {
      return operation.name == "attention_forward" || operation.name == "attention_backward" ? part.seconds : 0;
    });
  }
  template <class Value>
  double sum(Value value) const {
    double total = 0;
    for (const ModelledOperation& operation : step)
      for (const ModelledPart& part : operation.parts) total += value(operation, part);
    return total;
  }
  double flops() const {
    return sum([](const ModelledOperation&, const ModelledPart& part) { return part.flops; });
  }
};

// Rows of wpe are read and added once, or at the start of each cycle, and their gradients with them. Where attention
// knows positions there is no wpe.
TEST(ModelledStep, HasPositionsWhereTheModelLearnsThem) {
  const struct {
    const char* wiring;
    double embedding, coordinates;  // tensors of rows that the forward pass reads and writes
    double gradients;               // kernels for the gradient of wpe
  } cases[] = {{"plain", 3, 0, 1},  {"rope", 2, 0, 0},         {"relative", 2, 0, 0},
               {"modern", 2, 0, 0}, {"universal(6)", 2, 6, 2}, {"universal(6) rope", 2, 4, 0}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.wiring);
    const ModelledModel m(c.wiring, 2, 1024);
    const double rows = 2048.0 * m.config.channels * sizeof(floatX);
    const auto bytes_of = [&](const std::string& name) {
      return m.sum([&](const ModelledOperation& operation, const ModelledPart& part) {
        return operation.name == name ? part.bytes / rows : 0;
      });
    };
    EXPECT_EQ(bytes_of("embedding_forward"), c.embedding);
    EXPECT_EQ(bytes_of("add_coordinates"), c.coordinates);
    EXPECT_EQ(m.sum([](const ModelledOperation&, const ModelledPart& part) {
      return part.name == "wpe" ? double(part.kernels) : 0;
    }),
              c.gradients);
  }
}

// What a step needs, and the rows of the head that pad the vocabulary.
TEST(ModelledStep, HasTheArithmeticThatTheModelNeeds) {
  for (const char* wiring : {"plain", "sla(9,9)", "gqa(4)", "window(100)", "strided(32)", "share(2) window(256, SSL)",
                             "also(3,6)", "reuse(2)", "universal(1)", "gru"})
    for (int T : {1024, 1000, 8192}) {
      const ModelledModel m(wiring, 3, T);
      const double padding = 6.0 * double(padded_vocab_size(m.config) - m.config.vocab_size) * m.config.channels;
      const double needed = (flops_per_token(m.config, m.plan, T) + padding) * m.tokens;
      EXPECT_NEAR(m.flops() / needed, 1, 1e-9) << wiring << ", T " << T;
    }
}

TEST(ModelledStep, ComputesAgainWhatIsRecomputed) {
  const double all_kept = ModelledModel("sla(9,9)", 2, 1024).flops();
  for (Recompute level : {Recompute::activation, Recompute::norm})
    EXPECT_EQ(ModelledModel("sla(9,9)", 2, 1024, level).flops(), all_kept);
  const ModelledModel blocks("sla(9,9)", 2, 1024, Recompute::block);
  // q, the projection and the MLP's first matmul of all layers but the last, which is still there, and their attention.
  const double C = blocks.config.channels, layers = blocks.config.num_layers - 1;
  const double attention = 4.0 * 64 * attention_pairs(blocks.plan, 0, 1024).scored / 1024;
  EXPECT_NEAR((blocks.flops() - all_kept) / (layers * (2 * 6 * C * C + attention) * blocks.tokens), 1, 1e-9);
  // With chunks, the last layer's as well.
  const double chunks = ModelledModel("sla(9,9)", 2, 1024, Recompute::chunks).flops();
  EXPECT_NEAR((chunks - blocks.flops()) / (2 * 4 * C * C * blocks.tokens), 1, 1e-9);
}

// No part is faster than the GPU's memory and tensor cores are, and each takes the share of them that is assumed.
TEST(ModelledStep, IsNotFasterThanTheGpu) {
  for (const GpuSpec& gpu : {h100_sxm(), a100_sxm()})
    for (const char* wiring : {"plain", "sla(9,9)", "topk(64)", "blend(0.5)", "gate", "dense"}) {
      const ModelledModel m(wiring, 2, 2048, Recompute::nothing, gpu);
      m.sum([&](const ModelledOperation& operation, const ModelledPart& part) {
        EXPECT_GE(part.seconds, part.bytes / (gpu.bandwidth * gpu.copy_share)) << operation.name << ": " << part.name;
        EXPECT_GE(part.seconds, part.flops / (gpu.peak_flops * gpu.matmul_share))
            << operation.name << ": " << part.name;
        EXPECT_GE(part.kernels, 1) << operation.name << ": " << part.name;
        return 0.0;
      });
      EXPECT_GT(modelled_seconds(m.step), 0.5 * flops_per_token(m.config, m.plan, 2048) * m.tokens / gpu.peak_flops);
    }
}

// Tiles cover the product, waves the tiles; and the last wave is counted whole.
TEST(ModelledStep, MultipliesInWholeWavesOfTiles) {
  const GpuSpec gpu = h100_sxm();
  const ModelledPart full = modelled_matmul(gpu, "", 128 * 12, 256 * 11, 4096, sizeof(floatX), false);  // 132 tiles
  EXPECT_EQ(full.tiles.tiles, 132);
  EXPECT_EQ(full.tiles.waves, 1);
  EXPECT_NEAR(full.seconds,
              2.0 * 128 * 256 * (4096 + matmul_tile_overhead) / (gpu.peak_flops * gpu.matmul_share / 132) +
                  seconds_between_kernels,
              1e-9);
  const ModelledPart one_more = modelled_matmul(gpu, "", 128 * 12, 256 * 11 + 1, 4096, sizeof(floatX), false);
  EXPECT_GT(one_more.seconds, 1.1 * full.seconds);
  const ModelledModel m("sla(9,9)", 5, 1000);
  m.sum([&](const ModelledOperation& operation, const ModelledPart& part) {
    const MatmulTiles& t = part.tiles;
    if (t.m == 0) return 0.0;
    EXPECT_GE(double(t.tiles) * t.rows * t.columns / t.splits, double(t.m * t.n)) << operation.name;
    EXPECT_GE(t.waves * gpu.multiprocessors, t.tiles) << operation.name;
    EXPECT_LT((t.waves - 1) * gpu.multiprocessors, t.tiles) << operation.name;
    return 0.0;
  });
}

// With the same tokens in fewer sequences attention takes longer; beside it only wpe has another size.
TEST(ModelledStep, TakesMoreAttentionForLongerSequences) {
  const auto seconds = [](const ModelledModel& m, bool of_attention) {
    return m.sum([&](const ModelledOperation& operation, const ModelledPart& part) {
      const bool is_attention = operation.name == "attention_forward" || operation.name == "attention_backward";
      return is_attention == of_attention && operation.name != "embedding_backward" ? part.seconds : 0;
    });
  };
  const ModelledModel long_sequence("plain", 1, 8192), short_sequences("plain", 8, 1024);
  EXPECT_GT(seconds(long_sequence, true), 5 * seconds(short_sequences, true));
  // It has 8 times the pairs of a query and a key, but starts and ends fewer blocks.
  EXPECT_LT(seconds(long_sequence, true), 6.5 * seconds(short_sequences, true));
  EXPECT_NEAR(seconds(long_sequence, false) / seconds(short_sequences, false), 1, 0.02);  // AdamW has more rows of wpe
  EXPECT_LT(seconds(ModelledModel("window(1024)", 1, 8192), true), 2.5 * seconds(short_sequences, true));
}

// Documents of 1,024 tokens in a long sequence cost little more than sequences of 1,024 do: that they begin anywhere in
// the kernels' tiles.
TEST(ModelledStep, TakesTheAttentionOfItsDocuments) {
  const std::vector<double> places(1024, 1.0 / 1024);
  Segments segments;
  segments.places = &places;
  const ModelledModel documents("documents", 1, 16384, Recompute::nothing, h100_sxm(), segments),
      sequences("plain", 16, 1024), whole("documents", 1, 16384);
  const double padding =
      6.0 * double(padded_vocab_size(documents.config) - documents.config.vocab_size) * documents.config.channels;
  const double needed =
      (flops_per_token(documents.config, documents.plan, 16384, segments) + padding) * documents.tokens;
  EXPECT_NEAR(documents.flops() / needed, 1, 1e-9);
  EXPECT_GT(documents.attention_seconds(), sequences.attention_seconds());
  EXPECT_LT(documents.attention_seconds(), 1.1 * sequences.attention_seconds());
  EXPECT_EQ(whole.attention_seconds(), ModelledModel("plain", 1, 16384).attention_seconds());
}
