// Steps: what the training loop queues, uploads and waits for, and what it skips.
#pragma once
#include <gtest/gtest.h>
#include "dev/test/files.h"
#include "dev/test/long.h"
#include "dev/test/model/model.h"
#include "dev/test/values.h"
#include "llmc/train/training.h"

inline ModelConfig three_layers() {
  ModelConfig config = small_config();
  config.num_layers = 3;
  return config;
}

// A run of updates of `accumulation` micro-batches of 2 x 9 tokens, as the program makes it ready, on random tokens.
inline std::unique_ptr<Trainer> make_trainer(const ModelConfig& config, int recompute, int64_t accumulation) {
  const TemporaryFolder folder;  // the file stays open
  const std::string path = folder.path + "/tokens.bin";
  const std::vector<int> tokens = random_tokens(2000, config.vocab_size, 3);
  const std::vector<uint16_t> words(tokens.begin(), tokens.end());
  write_file(path, std::string(reinterpret_cast<const char*>(words.data()), words.size() * 2));
  auto trainer = std::make_unique<Trainer>();
  Run& run = trainer->run;
  run.B = 2, run.T = 9, run.grad_accum_steps = accumulation, run.steps = 100;
  run.options.seq_len = run.T, run.options.total_batch = accumulation * run.B * run.T;
  run.schedule = {"constant", 1e-3, 1, 0, run.steps};
  run.train = std::make_unique<DataLoader>(path, config.vocab_size, run.T);
  gpt2_declare(trainer->model, config, {run.B, run.T, Recompute(recompute)});
  allocate(*trainer);
  init_weights(trainer->model, 4);
  start_loading(*trainer);
  return trainer;
}

// An update of the trainer without staged uploads and without a CUDA graph; returns its loss.
inline double eager_step(Trainer& trainer) {
  GPT2& model = trainer.model;
  Run& run = trainer.run;
  const TrainOptions& o = run.options;
  const size_t n = size_t(run.B) * size_t(run.T);
  std::vector<int> inputs(n), targets(n);
  gpt2_zero_grad(model);
  gpt2_zero_loss(model);
  for (int64_t i = 0; i < run.grad_accum_steps; i++) {
    run.train->load_batches(run.train->next_sequence, 1, inputs.data(), targets.data(), run.B);
    run.train->next_sequence += run.B;
    copy_to_device(model.acts.tokens, inputs.data(), n * sizeof(int));
    copy_to_device(model.acts.targets, targets.data(), n * sizeof(int));
    gpt2_forward_backward(model,
                          batch_of_segments(run.B, run.T, 0, float(1.0 / (double(n) * double(run.grad_accum_steps)))));
  }
  run.step++;
  gpt2_update(model, run.step, {run.schedule(run.step), o.beta1, o.beta2, o.eps, o.weight_decay, o.grad_clip});
  return gpt2_read_stats(model).loss / double(run.grad_accum_steps);
}

TEST(LONG_ON_EMU(Steps), HaveTheBitsOfTheSameWorkDoneEagerly) {
  for (int recompute : {0, 3}) {
    for (int skip_heads : {0, 3}) {
      ModelConfig config = three_layers();
      config.wiring = skip_layer_wiring(2, skip_heads);
      auto trainer = make_trainer(config, recompute, 3), eager = make_trainer(config, recompute, 3);
      for (int step = 1; step <= 3; step++) EXPECT_EQ(train_step(*trainer).loss, eager_step(*eager)) << "step " << step;
      expect_the_same_weights_and_moments(trainer->model, eager->model);
    }
  }
}

TEST(LONG_ON_EMU(Steps), AreCapturedAgainForOtherShapesAndGradientScales) {
  auto model = make_model(three_layers(), 4, 18), direct = make_model(three_layers(), 4, 18);
  init_weights(*model, 1);
  init_weights(*direct, 1);
  struct Shape {
    int B, T, accumulation;
  };
  for (const Shape& s : {Shape{4, 18, 1}, {2, 18, 1}, {2, 18, 4}, {2, 8, 4}, {4, 18, 1}}) {
    SCOPED_TRACE(format("%d x %d, %d micro-batches", s.B, s.T, s.accumulation));
    gpt2_zero_grad(*model);
    gpt2_zero_grad(*direct);
    for (uint32_t i = 0; i < 3; i++) {
      const auto inputs = random_tokens(int64_t(s.B) * s.T, 101, 2 * i),
                 targets = random_tokens(int64_t(s.B) * s.T, 101, 2 * i + 1);
      const double loss = micro_step(*model, inputs, targets, s.B, s.T, s.accumulation);
      copy_to_device(direct->acts.tokens, inputs.data(), inputs.size() * sizeof(int));
      copy_to_device(direct->acts.targets, targets.data(), targets.size() * sizeof(int));
      gpt2_zero_loss(*direct);
      gpt2_forward_backward(*direct, batch_of_segments(s.B, s.T, 0, float(1.0 / (double(s.B) * s.T * s.accumulation))));
      EXPECT_EQ(loss, gpt2_read_stats(*direct).loss);
    }
    EXPECT_EQ(grad_norm(*model), grad_norm(*direct));
    for (int i = 0; i < model->num_tensors(); i++)
      EXPECT_EQ(full_tensor(*model, model->grad_memory, i), full_tensor(*direct, direct->grad_memory, i))
          << model->tensor(i).name;
  }
}

// Weights, masters and moments, element by element.
inline std::vector<std::vector<float>> state_of(const GPT2& model) {
  std::vector<std::vector<float>> state;
  for (int i = 0; i < model.num_tensors(); i++) {
    const size_t n = size_t(model.tensor(i).num_elements());
    state.push_back(to_floats(model.weight_memory + model.tensor(i).element_offset(), n));
    for (const float* arena : {model.master_memory, model.m_memory, model.v_memory})
      state.push_back(full_tensor(model, arena, i));
  }
  return state;
}

inline bool same_state(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return same_bits(x, y); });
}

// Whatever training does with the model while it is written.
TEST(LONG_ON_EMU(Steps), LeaveACheckpointOfTheModelAtItsBeginning) {
  auto trainer = make_trainer(three_layers(), 0, 1);
  auto* run = &trainer->run;
  const TemporaryFolder folder;
  run->options.out = folder.path;
  GPT2& model = trainer->model;
  trainer->checkpoint_copy = PinnedBuffer<float>(checkpoint_copy_bytes(model, 0) / sizeof(float));
  train_step(*trainer);
  const auto before = state_of(model);
  save_checkpoint(*trainer);
  for (float* arena : {model.master_memory, model.m_memory, model.v_memory})
    device_memset(arena, 0, model.state_bytes());
  const SaveResult saved = *run->writer.result(/*wait=*/true);
  ASSERT_EQ(saved.error, "");
  auto restored = make_model(three_layers(), 2, 9);
  read_weights(saved.folder, restored->parameters, store_weights(*restored));
  read_moments(saved.folder, restored->parameters, store_shard(*restored, restored->m_memory),
               store_shard(*restored, restored->v_memory));
  EXPECT_TRUE(same_state(state_of(*restored), before));
}

TEST(LONG_ON_EMU(Steps), WithANonFiniteLossChangeNothingAndAreCounted) {
  auto trainer = make_trainer(three_layers(), 0, 3);
  const auto* run = &trainer->run;
  GPT2& model = trainer->model;
  EXPECT_FALSE(train_step(*trainer).skipped);
  floatX kept;
  copy_to_host(&kept, model.params.wpe, sizeof kept);
  const floatX infinity = floatX(INFINITY);
  copy_to_device(model.params.wpe, &infinity, sizeof infinity);
  const auto before = state_of(model);
  const int64_t sequences = run->train->next_sequence;
  for (int64_t bad = 1; bad <= 2; bad++) {
    const StepResult result = train_step(*trainer);
    EXPECT_TRUE(result.skipped);
    EXPECT_TRUE(std::isnan(result.loss));
    EXPECT_EQ(run->step, 1 + bad);
    EXPECT_EQ(run->skipped_steps, bad);
    EXPECT_EQ(run->bad_steps_in_row, bad);
  }
  EXPECT_EQ(run->train->next_sequence, 3 * sequences) << "the data continues";
  EXPECT_TRUE(same_state(state_of(model), before));
  copy_to_device(model.params.wpe, &kept, sizeof kept);
  EXPECT_FALSE(train_step(*trainer).skipped);
  EXPECT_EQ(run->skipped_steps, 2);
  EXPECT_EQ(run->bad_steps_in_row, 0);
}

// Otherwise every later segment would attend to it.
TEST(LONG_ON_EMU(Steps), WithANonFiniteLossLeaveNothingOfItInTheMemory) {
  ModelConfig config = three_layers();
  config.wiring = parse_wiring("rope memory(30)");
  auto trainer = make_trainer(config, 0, 2);
  GPT2& model = trainer->model;
  EXPECT_FALSE(train_step(*trainer).skipped);
  EXPECT_EQ(model.remembered, 18);
  floatX kept;
  copy_to_host(&kept, model.params.layers[0].ln1.weight, sizeof kept);
  const floatX infinity = floatX(INFINITY);
  copy_to_device(model.params.layers[0].ln1.weight, &infinity, sizeof infinity);
  EXPECT_TRUE(train_step(*trainer).skipped);
  copy_to_device(model.params.layers[0].ln1.weight, &kept, sizeof kept);
  EXPECT_FALSE(train_step(*trainer).skipped);
}

TEST(LONG_ON_EMU(Steps), WithANormThatIsNotFiniteChangeNothingEither) {
  auto model = make_model(three_layers(), 2, 9);
  loss_curve(*model, 1, 5);
  const auto tokens = random_tokens(18, 101, 1);
  const UpdateOptions options = {1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0};
  gpt2_zero_grad(*model);
  EXPECT_TRUE(std::isfinite(micro_step(*model, tokens, tokens, 2, 9, 1)));
  const auto before = state_of(*model);
  const float gradient = to_floats(model->grads.lnf.weight, 1)[0], infinity = INFINITY;
  copy_to_device(model->grads.lnf.weight, &infinity, sizeof infinity);
  gpt2_update(*model, 2, options);
  EXPECT_TRUE(std::isinf(gpt2_read_stats(*model).grad_squares));
  EXPECT_TRUE(same_state(state_of(*model), before));
  copy_to_device(model->grads.lnf.weight, &gradient, sizeof gradient);
  gpt2_update(*model, 2, options);
  EXPECT_FALSE(same_state(state_of(*model), before));
}

#ifdef SLA_EMU
// Shared K/V is read in place: the forward pass of a model with skip-layer attention runs what the baseline's does,
// kernel for kernel. The backward pass has two copies more for each layer that shares K/V heads, of the accumulated dK
// and of dV.
TEST(LONG_ON_EMU(Steps), CopyNoSharedKvForwardAndItsGradientsOnceBackward) {
  std::vector<emu::Counters> forward, backward;
  uint64_t loads = 0;
  for (int skip_heads : {0, 3}) {
    ModelConfig config = small_config();
    config.num_layers = 4, config.wiring = skip_layer_wiring(2, skip_heads);
    auto model = make_model(config, 2, 9);
    init_weights(*model, 1);
    const auto tokens = random_tokens(18, config.vocab_size, 1);
    auto counted = [&](auto work) {
      gpt2_read_stats(*model);  // everything before is done
      const emu::Counters before = emu::counters();
      work();
      gpt2_read_stats(*model);
      emu::Counters after = emu::counters();
      after.kernels -= before.kernels, after.matmuls -= before.matmuls, after.memsets -= before.memsets;
      after.bytes_on_device -= before.bytes_on_device;
      return after;
    };
    gpt2_forward(*model, tokens.data(), {2, 9});
    gpt2_loss(*model, tokens.data(), {2, 9}, double(2) * 9);
    forward.push_back(counted([&] { gpt2_forward(*model, {2, 9}); }));
    backward.push_back(counted([&] { gpt2_backward(*model, {2, 9}); }));
    for (const std::vector<int>& shared : model->attention_plan.shared[Qkv::k])
      loads += 2 * !shared.empty();  // the last heads: one copy of dK, one of dV
  }
  EXPECT_EQ(forward[1].kernels, forward[0].kernels);
  EXPECT_EQ(forward[1].matmuls, forward[0].matmuls);
  EXPECT_EQ(forward[1].memsets, 0u);
  EXPECT_EQ(forward[1].bytes_on_device, 0u);
  EXPECT_EQ(loads, 4u);
  EXPECT_EQ(backward[1].kernels, backward[0].kernels + loads);
  EXPECT_EQ(backward[1].matmuls, backward[0].matmuls);
  EXPECT_EQ(backward[1].bytes_on_device, 0u);
}

TEST(LONG_ON_EMU(Steps), WaitOnceAndReplayEachMicroBatchAsOneGraph) {
  auto trainer = make_trainer(three_layers(), 0, 3);
  const emu::Counters start = emu::counters();
  train_step(*trainer);
  const emu::Counters first = emu::counters();
  EXPECT_EQ(first.host_waits - start.host_waits, 1u);
  EXPECT_EQ(first.graph_launches - start.graph_launches, 2u) << "the first is queued piece by piece";
  for (int step = 2; step <= 4; step++) {
    const emu::Counters before = emu::counters();
    train_step(*trainer);
    const emu::Counters after = emu::counters();
    EXPECT_EQ(after.host_waits - before.host_waits, 1u);
    EXPECT_EQ(after.graph_launches - before.graph_launches, 3u);
    EXPECT_EQ(after.launches - before.launches, 3u) << "the norm's two kernels and the update's";
    EXPECT_GT(after.matmuls - before.matmuls, 3u * 3 * 4);
    EXPECT_EQ(after.bytes_to_device - before.bytes_to_device, 3u * 2 * 2 * 9 * sizeof(int));
    EXPECT_EQ(after.bytes_to_host - before.bytes_to_host, sizeof(StepStats));
  }
}

// A seed draws how far the uploads run ahead of the operations, or lag behind.
TEST(LONG_ON_EMU(Steps), DoNotDependOnWhenUploadsRun) {
  ModelConfig config = small_config();
  config.num_layers = 1, config.wiring = Wiring();
  auto eager = make_trainer(config, 0, 5);
  std::vector<double> expected;
  for (int step = 1; step <= 3; step++) expected.push_back(eager_step(*eager));
  for (uint64_t seed = 1; seed <= 8; seed++) {
    emu::set_seed(seed);
    auto trainer = make_trainer(config, 0, 5);
    std::vector<double> losses;
    for (int step = 1; step <= 3; step++) losses.push_back(train_step(*trainer).loss);
    EXPECT_EQ(losses, expected) << "seed " << seed;
    expect_the_same_weights_and_moments(trainer->model, eager->model);
  }
}
#endif
