// GPT-2 with skip-layer attention (SLA): the model, its forward and backward pass, the optimizer, generation, the
// training loop and the command line. Read from top to bottom it is: the model's memory; the forward pass; the backward
// pass; the update; generation; training; main. Which activations there are, and what each layer needs of them, is in
// llmc/model/ (activations.h, sublayers.h).
//
// The graph is written once. What it calls (matmul_forward, attention_backward, ...) is a set of operations of the same
// names and signatures for each kind of device: llmc/cuda/ for a GPU (and for dev/emu, which runs the same kernels
// without one), llmc/cpu/ for the host. What a job needs and a model does not know (options, data, log, checkpoints,
// what is printed) is in llmc/run/.
//
// B: sequences in a micro-batch, T: their length, C: channels, L: layers, h: heads, hs: head size, V: vocabulary,
// QKV: q, k and v of one token in one layer, C + 2 * hs * (heads whose k and v the layer projects).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <vector>
#include "llmc/io/checkpoint.h"
#include "llmc/io/model_file.h"
#include "llmc/model/activations.h"
#include "llmc/model/attention_plan.h"
#include "llmc/model/change_wiring.h"
#include "llmc/model/config_json.h"
#include "llmc/model/flops.h"
#include "llmc/model/orthogonalize.h"
#include "llmc/model/model_memory.h"
#include "llmc/model/parameters.h"
#include "llmc/model/stream_memory.h"
#include "llmc/operations.h"
#include "llmc/model/sublayers.h"
#include "llmc/model/print_model.h"
#include "llmc/ops/precision.h"
#include "llmc/run/print_memory_plan.h"
#include "llmc/run/model_options.h"
#include "llmc/run/print.h"
#include "llmc/run/run.h"
#include "llmc/run/stop_signal.h"
#include "llmc/run/timeline.h"
#include "llmc/text/sampler.h"
#include "llmc/text/step_loader.h"
#include "llmc/text/validation_batches.h"
#include "llmc/utils/arena.h"
#include "llmc/utils/clock.h"
#include "llmc/utils/crc32c.h"
#include "llmc/utils/error.h"
#include "llmc/utils/memory_plan.h"
#include "llmc/utils/message.h"
#include "llmc/utils/program.h"
#include "llmc/utils/random.h"

// ----------------------------------------------------------------------------
// The model's memory

struct PlanOptions {
  int B = 1, T = 1;  // what the activations have room for
  Recompute recompute = Recompute::nothing;
  bool keep_dead_kv = false;                  // project K/V heads that no query head attends to
  Shard shard = {};                           // what of the optimizer state is in this process
  int64_t logit_bytes = logit_chunk_bytes();  // what a chunk of logits may take
  size_t sampling_bytes = 0;                  // what the plan that draws samples takes
  // What Muon's iteration may take, in elements of floatX.
  int64_t muon_elements = muon_workspace_elements;
  bool muon = false;  // Muon updates the layers' matrices, of which a shard has whole ones
};

struct GenerationOptions {
  int slots = 1;           // sequences in the K/V cache,
  int64_t max_length = 1;  //   and their length
  int64_t rows = 1;        // tokens computed at a time, at least one for each slot
  bool losses = false;     // logits are computed of every token, in chunks, not only of each sequence's last one
  bool keep_dead_kv = false;
  Shard shard = {};  // of the model whose weights these are
  int64_t logit_bytes = logit_chunk_bytes();
};

// Generation with weights of its own, or with those of a model that was planned with `training`.
GenerationOptions generation_options(int slots, int64_t max_length, const PlanOptions& training = {}) {
  const int64_t rows = std::max<int64_t>(slots, std::min(max_length, prompt_rows));
  return {slots, max_length, rows, /*losses=*/false, training.keep_dead_kv, training.shard, training.logit_bytes};
}

struct GPT2 : ModelShape, ModelMemory {
  Params<floatX> params;
  Params<float> grads;
  DeviceArray<ParameterChunk> chunks;  // AdamW's, then those of the matrices that Muon updates
  int64_t num_adamw_chunks = 0;
  DeviceArray<MuonMatrix> matrices;  // training->matrices

  ActivationArena activations;
  char* activation_memory = nullptr;
  Activations acts;
  Sublayers sublayers;  // operations read weights through sublayer(i), norm(i), embeddings()
  KVCache cache;        // used in generation alone
  MemoryPlan memory;
  int64_t remembered = 0;  // positions of each stream that the layers' memory holds, in training
  // gpt2_forward_backward with B, T, remembered, dloss
  CudaGraph<int, int, int64_t, float> forward_backward;
  CudaGraph<> matrix_update;           // gpt2_move_matrices
  PinnedBuffer<StepStats> host_stats;  // (1): where gpt2_read_stats reads them to
  Collectives collectives;             // of the ranks that train together
  // How many buckets of the weights that ranks gather after an update have been awaited: none right after the update;
  // all of them where no rank gathers.
  size_t buckets_awaited = 0;
  Timeline timeline;

  floatX* hidden_states() const { return sublayers.last_norm.out; }  // (N, C): the final ones

  ~GPT2() { device_free(activation_memory, activations.layout.bytes); }

  // What to compute with. With ZeRO-1 weights may still be arriving from other ranks: each accessor makes the
  // operations that are called after it wait for its bucket, which costs nothing once that has been awaited.
  const Params<floatX>& embeddings() { return await_bucket(params.embedding_bucket), params; }
  const Sublayer& sublayer(int i) { return await_bucket(sublayers.list[size_t(i)].bucket), sublayers.list[size_t(i)]; }
  const Norm& norm(int i) { return await_bucket(sublayers.norm(i).bucket), sublayers.norm(i); }
  void await_all_weights() { await_bucket(int(parameters.buckets.size()) - 1); }

 private:
  void await_bucket(int bucket) {
    for (; int(buckets_awaited) <= bucket && buckets_awaited < parameters.buckets.size(); buckets_awaited++)
      collectives.await(buckets_awaited);
  }
};

// The part of a plan that training and generation have in common. `most_logit_rows`: so many rows of logits may be
// wanted at once.
void declare_model(GPT2& model, const ModelConfig& config, bool keep_dead_kv, const Shard& shard) {
  validate(config);
  if (config.head_size() % head_size_multiple != 0 || config.head_size() > largest_head_size)
    user_error("%d channels in %d heads: a head has %d, but must have a multiple of %d and at most %d here",
               config.channels, config.num_heads, config.head_size(), head_size_multiple, largest_head_size);
  if (config.channels > largest_channels) user_error("%d channels: at most %d here", config.channels, largest_channels);
  model.config = config;
  model.attention_plan = make_attention_plan(config, keep_dead_kv);
  model.parameters = make_parameter_table(config, model.attention_plan, shard);
  model.buckets_awaited = model.parameters.buckets.size();
  model.logit_stride = padded_vocab_size(config);  // columns are whole tiles, with zeros where the vocabulary ends
  model.memory = {};
  model.memory[MemoryGroup::weights] = model.weight_bytes() + model.constant_bytes();
  model.memory[MemoryGroup::workspaces] = device_workspace_bytes();
}

int64_t planned_logit_rows(const GPT2& model, int64_t rows, int64_t logit_bytes) {
  return logit_chunk_rows(rows, model.logit_stride * int64_t(sizeof(floatX)), logit_bytes);
}

void declare_activations(GPT2& model) {
  model.activations = ActivationArena();
  ActivationList list = {model, model.activations, model.memory};
  declare(model.acts, list);
  declare(model.sublayers, list);
}

// Fixes the model's shape and lays out its memory for training, without allocating any of it. Throws UserError for a
// shape that the device's kernels don't take.
void gpt2_declare(GPT2& model, const ModelConfig& config, const PlanOptions& o) {
  CHECK(1 <= o.B && 1 <= o.T && o.T <= config.max_seq_len && o.recompute < Recompute::above_all_levels);
  CHECK(!o.muon || o.shard.count == 1 || o.shard.whole_matrices);
  declare_model(model, config, o.keep_dead_kv, o.shard);
  model.rows = int64_t(o.B) * o.T;
  model.training = {o.B, o.T, recompute_level(model.attention_plan, o.recompute)};
  if (o.muon) {
    model.training->matrices = muon_matrices(model.parameters);
    model.training->batches = make_muon_batches(model.training->matrices, o.muon_elements);
  }
  model.logit_rows = planned_logit_rows(model, model.rows, o.logit_bytes);
  model.sublayers = make_sublayers(config, model.attention_plan);
  declare_recomputation(model.sublayers, model.training->recompute);
  model.memory[MemoryGroup::master_weights] = has_master_weights ? model.state_bytes() : 0;
  model.memory[MemoryGroup::gradients] = model.parameters.layout.bytes;
  model.memory[MemoryGroup::moments] = 2 * model.state_bytes();
  model.memory[MemoryGroup::sampling] = o.sampling_bytes;
  declare_activations(model);
}

// Plans the model for generation: no gradients and no optimizer, a K/V cache, and activations that all layers share.
void gpt2_declare_generation(GPT2& model, const ModelConfig& config, const GenerationOptions& o) {
  CHECK(1 <= o.slots && o.slots <= o.rows && 1 <= o.max_length && o.max_length <= config.longest_text());
  declare_model(model, config, o.keep_dead_kv, o.shard);
  hide_what_memory_has_lost(model.attention_plan, config.max_seq_len, o.max_length);
  model.rows = o.rows;
  model.generation = plan_kv_cache(model.attention_plan, o.slots, o.max_length, o.rows);
  model.cache = KVCache(*model.generation);
  model.sublayers = make_sublayers(config, model.attention_plan, /*is_generation=*/true);
  const int64_t logit_rows = planned_logit_rows(model, o.losses ? o.rows : o.slots, o.logit_bytes);
  model.logit_rows = std::max<int64_t>(logit_rows, o.slots);  // those of a pass that draws are fetched at once
  declare_activations(model);
}

// The memory that micro-batches of B sequences would take; nothing is allocated.
MemoryPlan gpt2_memory(const ModelConfig& config, int B, PlanOptions o) {
  GPT2 model;
  o.B = B;
  gpt2_declare(model, config, o);
  return model.memory;
}

// Sets every byte of the activations, but for constants, whose staging buffers are then written to.
void gpt2_fill_activations(GPT2& model, int value) {
  device_memset(model.activation_memory, value, model.activations.layout.bytes);
  set_constants(model.acts, model);
  uploads_wait_for_compute();
}

// Which pieces of the parameters the optimizers update.
void plan_update(GPT2& model) {
  std::vector<MuonMatrix>& matrices = model.training->matrices;
  std::vector<ParameterChunk> chunks = parameter_chunks(model.parameters, /*muon=*/!matrices.empty());
  model.num_adamw_chunks = int64_t(chunks.size());
  append_chunks(chunks, matrices);
  model.chunks = DeviceArray<ParameterChunk>(chunks);
  model.matrices = DeviceArray<MuonMatrix>(matrices);
}

// Allocates what has been planned, and sets all pointers. Weights, gradients and moments are zero; but the weights are
// those of `weights_of`, if that is given. A build that checks (make DEBUG=1, dev/emu) fills the activations with NaN,
// so that one that is read before it is written shows.
void gpt2_allocate(GPT2& model, const GPT2* weights_of = nullptr) {
  auto pointers = [&](auto* arena) {
    return parameter_pointers(model.config, model.attention_plan, model.parameters, arena, model.constant_memory);
  };
  if (weights_of == nullptr) model.allocate_weights();
  else model.use_weights_of(*weights_of);
  model.params = pointers(model.weight_memory);
  if (model.training) {
    model.allocate_training_state();
    model.grads = pointers(model.grad_memory);
    plan_update(model);
  }
  model.activation_memory = static_cast<char*>(device_malloc(model.activations.layout.bytes));
  uploads_wait_for_compute();
  model.activations.layout.forbid_gaps(model.activation_memory);
  model.activations.bind(model.activation_memory);
  set_constants(model.acts, model);
#if defined(SLA_DEBUG) || defined(SLA_EMU)
  gpt2_fill_activations(model, 0xff);  // all ones: NaN as float and as bf16
#endif
  model.host_stats = PinnedBuffer<StepStats>(1);
  bind_sublayers(model.sublayers, model, model.params, model.grads, model.acts,
                 model.generation ? &model.cache : nullptr);
}

// ----------------------------------------------------------------------------
// Forward

// Computes the final hidden states, last_norm.out (N, C), of acts.tokens (N), where N is batch.rows().
void gpt2_forward(GPT2& model, const Batch& batch) {
  CHECK(1 <= batch.rows() && batch.rows() <= model.rows && batch.T <= model.config.max_seq_len);
  CHECK(batch.parts.empty() == model.training.has_value());
  embed(model.sublayers, model.embeddings(), model.acts, batch);
  norm_forward(model.norm(0), batch.rows());
  for (int i = 0; i < model.sublayers.size(); i++) {
    const Sublayer& sublayer = model.sublayer(i);
    const Timeline::Scope span = model.timeline.span("forward", sublayer.bucket);
    branch_forward(sublayer, batch);                       // acts.branch_out =
    residual_forward(sublayer, model.norm(i + 1), batch);  // the residual stream after it, and what follows
  }
}

// Computes the final hidden states, last_norm.out (N, C), of `tokens` (N) in host memory, which are copied to
// acts.tokens.
void gpt2_forward(GPT2& model, const int* tokens, const Batch& batch) {
  CHECK(batch.rows() <= model.rows);
  copy_to_device(model.acts.tokens, tokens, size_t(batch.rows()) * sizeof(int));
  gpt2_forward(model, batch);
}

// Computes the hidden states of the next segments of B streams, and remembers them.
void gpt2_forward_segments(GPT2& model, const int* tokens, int64_t B, int64_t T) {
  const Batch batch = batch_of_segments(B, T, model.remembered);
  gpt2_forward(model, tokens, batch);
  remember(model.sublayers, batch);
  model.remembered = remembered_after(model.attention_plan.table.memory, batch);
}

// acts.logits = the logits of `count` rows of the hidden states, from `first_row` on.
void gpt2_logits(GPT2& model, int64_t first_row, int64_t count) {
  const int64_t C = model.config.channels, Vp = model.logit_stride;
  matmul_forward(model.acts.logits, model.hidden_states() + first_row * C, model.params.wte, nullptr, count, C, Vp);
}

// The backward pass of gpt2_logits. From acts.logits, which holds the gradients of these logits: acts.dnorm = the
// gradients of the hidden states' rows, grads.wte +=.
void gpt2_logits_backward(GPT2& model, int64_t first_row, int64_t count) {
  const int64_t C = model.config.channels, Vp = model.logit_stride;
  const Activations& acts = model.acts;
  gemm('N', 'N', count, C, Vp, acts.logits, Vp, model.params.wte, C, false, acts.dnorm + first_row * C, C);
  gemm('T', 'N', Vp, C, count, acts.logits, Vp, model.hidden_states() + first_row * C, C, true, model.grads.wte, C);
}

// acts.losses (B, T) = cross-entropy of acts.targets, in nats, and 0 of those that are not_scored; acts.stats->loss +=
// their sum / divisor. With `backward` also the head's gradients of batch.dloss * sum(losses): acts.dnorm = that of the
// hidden states, grads.wte +=. Without it acts.correct (B, T) =, and is counted.
void gpt2_loss(GPT2& model, const Batch& batch, double divisor, bool backward) {
  const int64_t N = batch.rows(), V = model.config.vocab_size;
  const Activations& acts = model.acts;
  uint8_t* correct = backward ? nullptr : acts.correct;
  for (int64_t row = 0; row < N; row += model.logit_rows) {
    const int64_t count = std::min(model.logit_rows, N - row);
    gpt2_logits(model, row, count);
    classifier({acts.losses + row, acts.logits, acts.targets + row, count, V, model.logit_stride, batch.dloss, backward,
                backward ? nullptr : correct + row});
    if (backward) gpt2_logits_backward(model, row, count);
  }
  add_losses(acts.stats, {acts.losses, acts.ponder, correct, acts.targets, N, divisor});
}

// The losses of `targets` (B, T), on the host, without gradients.
void gpt2_loss(GPT2& model, const int* targets, const Batch& batch, double divisor) {
  copy_to_device(model.acts.targets, targets, size_t(batch.rows()) * sizeof(int));
  gpt2_loss(model, batch, divisor, /*backward=*/false);
}

constexpr int num_loss_sums = 5;  // of StepStats: what gpt2_loss adds up, loss and what follows
void gpt2_zero_loss(GPT2& model) { device_memset(&model.acts.stats->loss, 0, num_loss_sums * sizeof(double)); }

// What gpt2_loss has added up since gpt2_zero_loss, and what gpt2_update found. Waits for the device.
StepStats gpt2_read_stats(GPT2& model) {
  copy_to_host(model.host_stats.data, model.acts.stats, sizeof(StepStats));
  return *model.host_stats.data;
}

// ----------------------------------------------------------------------------
// Backward

// Begins the sum of a bucket's gradients over the ranks, beside the operations that follow: each rank will have that of
// its shard, or with one shard of all.
void gpt2_reduce_bucket(GPT2& model, size_t index) {
  const ParameterBucket& bucket = model.parameters.buckets[index];
  Collectives& c = model.collectives;
  c.comm_waits_for_compute();
  const Timeline::Scope span = model.timeline.span("reduce", index, &c);
  if (model.parameters.shard.count > 1) c.reduce_to_owners(model.grad_memory, bucket);
  else c.all_reduce(model.grad_memory + bucket.begin, bucket.count);
}

// grads += the gradients of what gpt2_forward and gpt2_loss computed last. acts.dnorm holds the gradient of the final
// hidden states. With `sum_over_ranks` a bucket's gradients are summed as soon as they are complete.
void gpt2_backward(GPT2& model, const Batch& batch, bool sum_over_ranks = false) {
  const Sublayers& sublayers = model.sublayers;
  auto complete = [&](int bucket) {
    if (sum_over_ranks) gpt2_reduce_bucket(model, size_t(bucket));
  };
  for (const ZeroedTensor& zeroed : sublayers.zeroed) device_memset(zeroed.x, 0, zeroed.bytes);
  norm_backward(sublayers.last_norm, batch.rows());
  complete(model.params.lnf_bucket);
  for (int i = sublayers.size() - 1; i >= 0; i--) {
    const Sublayer& sublayer = sublayers.list[size_t(i)];
    const Timeline::Scope span = model.timeline.span("backward", sublayer.bucket);
    for (const Recomputation& again : sublayer.again) compute_again(sublayers, again, batch);
    sublayer_backward(sublayer, batch);          // acts.dnorm =, from acts.dresidual
    norm_backward(sublayer.norm, batch.rows());  // acts.dresidual +=
    for (int bucket : sublayer.completes) complete(bucket);
  }
  embed_backward(sublayers, model.grads, model.acts, batch);
  complete(model.params.embedding_bucket);
}

void gpt2_zero_grad(GPT2& model) { device_memset(model.grad_memory, 0, model.parameters.layout.bytes); }

// What is computed on the micro-batch in acts.tokens and acts.targets: acts.stats->loss += its mean loss, grads += the
// gradients of batch.dloss * sum(losses). Then the layers remember it.
void gpt2_forward_backward(GPT2& model, const Batch& batch, bool sum_over_ranks = false) {
  gpt2_forward(model, batch);
  gpt2_loss(model, batch, double(batch.rows()), /*backward=*/true);
  gpt2_backward(model, batch, sum_over_ranks);
  remember(model.sublayers, batch);
}

// One micro-batch of an update that averages `num_micro_batches` of them, over all ranks: acts.stats->loss and grads +=
// as above, as if all tokens were scored: StepStats::grad_weight has the rest, so that the captured dloss stays. Waits
// for nothing: inputs and targets (B, T) lie in host memory, and if it is a PinnedBuffer's they stay as they are until
// gpt2_read_stats has returned. After a rank's last one gradients are summed over the ranks, and before its first one
// weights come from them; these two run eagerly, because they take two streams; the others are captured and replayed as
// a CUDA graph.
void gpt2_micro_step(GPT2& model, const int* inputs, const int* targets, int B, int T, int64_t num_micro_batches,
                     bool last = true) {
  Activations& a = model.acts;
  CHECK(1 <= B && 1 <= T && int64_t(B) * T <= model.rows);
  const size_t count = size_t(B) * size_t(T);
  upload({{a.tokens, a.staged_tokens, inputs, count}, {a.targets, a.staged_targets, targets, count}});
  const float dloss = float(1.0 / (double(B) * T * double(num_micro_batches)));
  const bool sum_over_ranks = last && model.collectives.size() > 1, weights_are_coming = model.buckets_awaited == 0;
  auto forward_backward = [&](int b, int t, int64_t remembered, float d) {
    gpt2_forward_backward(model, batch_of_segments(b, t, remembered, d), sum_over_ranks);
  };
  if (sum_over_ranks || weights_are_coming || model.timeline.on) forward_backward(B, T, model.remembered, dloss);
  else model.forward_backward.run(forward_backward, B, T, model.remembered, dloss);
  model.remembered = remembered_after(model.attention_plan.table.memory, batch_of_segments(B, T, model.remembered));
}

// x (count) = its sum over ranks: of acts.stats, whose doubles lie side by side.
void gpt2_sum_over_ranks(GPT2& model, double* x, int64_t count) {
  model.collectives.comm_waits_for_compute();
  model.collectives.all_reduce(x, count);
  model.collectives.compute_waits_for_comm();
}

// After gpt2_update acts.stats->stop_requests > 0 if this rank or another one asks for it: ranks stop after the same
// step.
void gpt2_request_stop(GPT2& model, bool asks) {
  double& requests = model.acts.stats->stop_requests;
  device_memset(&requests, asks ? 0x3f : 0, sizeof requests);  // eight bytes 0x3f are a small positive number
}

// ----------------------------------------------------------------------------
// Update

struct UpdateOptions {
  double learning_rate, beta1, beta2, eps, weight_decay;
  double grad_clip;        // 0: none
  double momentum = 0.95;  // of Muon
};

// acts.stats->grad_squares = the square of the gradients' 2-norm, of those in this rank's shard.
void gpt2_square_grads(GPT2& model) {
  sum_of_squares(&model.acts.stats->grad_squares, model.grad_memory, model.chunks.data, int64_t(model.chunks.size));
}

// Sends this rank's shard of the new weights to the others, bucket by bucket in the order in which the next forward
// pass awaits them.
void gpt2_gather_weights(GPT2& model) {
  const ParameterTable& table = model.parameters;
  Collectives& c = model.collectives;
  c.comm_waits_for_compute();
  for (size_t i = 0; i < table.buckets.size(); i++) {
    {
      const Timeline::Scope span = model.timeline.span("gather", i, &c);
      c.gather_from_owners(model.weight_memory, table.buckets[i]);
    }
    c.mark(i);
  }
  model.buckets_awaited = 0;
}

// Muon's part of an update, by the numbers in acts.muon_step. What it makes of a matrix's gradient before the iteration
// takes that gradient's place.
void gpt2_move_matrices(GPT2& model) {
  const Activations& acts = model.acts;
  const MuonArgs args = {model.weight_memory,
                         model.grad_memory,
                         model.master_memory,
                         model.m_memory,
                         model.chunks.data + model.num_adamw_chunks,
                         int64_t(model.chunks.size) - model.num_adamw_chunks,
                         model.matrices.data,
                         int64_t(model.matrices.size),
                         acts.muon_squares,
                         acts.muon_step,
                         acts.stats};
  muon_momentum(args);
  for (const MuonBatch& batch : model.training->batches) muon_update(args, orthogonalize(acts, args, batch), batch);
}

// Update number `step`, from 1, by AdamW and, of the matrices that are planned so, by Muon, with gradients clipped by
// their norm, but left as AdamW found them; weights of two or more dimensions decay. Changes nothing if the loss or the
// norm is not finite: gpt2_read_stats tells. Waits for nothing. Every rank takes the same decision and has the same
// weights afterwards: acts.stats becomes the sum over ranks before anything depends on it.
void gpt2_update(GPT2& model, int64_t step, const UpdateOptions& o) {
  AdamWStep s;
  s.learning_rate = float(o.learning_rate), s.beta1 = float(o.beta1), s.beta2 = float(o.beta2), s.eps = float(o.eps);
  s.bias_correction1 = float(1 - std::pow(o.beta1, double(step)));
  s.bias_correction2 = float(1 - std::pow(o.beta2, double(step)));
  s.grad_clip = o.grad_clip, s.weight_decay = float(o.weight_decay);
  Collectives& c = model.collectives;
  const bool is_sharded = model.parameters.shard.count > 1;
  c.compute_waits_for_comm();  // the sums of the gradients
  gpt2_square_grads(model);
  if (is_sharded) gpt2_sum_over_ranks(model, &model.acts.stats->grad_squares, num_loss_sums + 2);
  else gpt2_sum_over_ranks(model, &model.acts.stats->loss, num_loss_sums + 1);  // each rank has all gradients
  adamw_update(model.weight_memory, has_master_weights ? model.master_memory : nullptr, model.m_memory, model.v_memory,
               model.grad_memory, model.chunks.data, model.num_adamw_chunks, s, model.acts.stats);
  if (!model.training->matrices.empty()) {
    muon_set_step(model.acts.muon_step, {s.learning_rate, float(o.momentum), s.weight_decay, s.grad_clip});
    model.matrix_update.run([&] { gpt2_move_matrices(model); });
  }
  if (is_sharded) gpt2_gather_weights(model);
}

// host (parameters) = the masters, on rank 0, for a checkpoint. Every rank that has a shard calls it. They go by way of
// the gradients' arena, whose contents are not needed between two updates.
void gpt2_gather_masters(GPT2& model, float* host) {
  const ParameterTable& table = model.parameters;
  const float* arena = model.master_memory;
  Collectives& c = model.collectives;
  c.compute_waits_for_comm();  // weights that are coming
  if (table.shard.count > 1 && has_master_weights) {
    c.comm_waits_for_compute();
    for (const ParameterBucket& bucket : table.buckets) c.gather_from_owners(model.grad_memory, bucket, arena);
    c.compute_waits_for_comm();
    arena = model.grad_memory;
  }
  if (c.rank() != 0) return;
  for (int i = 0; i < model.num_tensors(); i++) fetch_from(model, arena)(i, host + model.tensor(i).element_offset());
}

// ----------------------------------------------------------------------------
// Generation

// Computes the next `tokens` of sequences in the K/V cache, one part after the other: their hidden states are rows
// [0, tokens). `counts`: how many tokens of which slots; model.rows in all at most.
void gpt2_extend(GPT2& model, const std::vector<int>& tokens, const std::vector<std::pair<int, int64_t>>& counts) {
  Batch batch;
  std::vector<KVCacheMove> moves;
  for (const auto& [slot, count] : counts) batch.parts.push_back(model.cache.append(slot, count, moves));
  CHECK(int64_t(tokens.size()) == batch.rows());
  for (const KVCacheMove& move : moves)
    if (const auto& kv = attention_of_layer(model.sublayers, move.layer).store_kv)
      copy_rows({kv->row(move.slot, 0), kv->width, kv->row(move.slot, move.from), kv->width, kv->width}, move.count);
  const CachedRows where(model.cache, batch.parts);
  const Activations& a = model.acts;
  set_positions(a, model, where.positions);
  copy_to_device(a.cache_rows, where.rows);
  copy_to_device(a.sequences, where.sequences);
  batch.positions_of_parts = a.positions;
  gpt2_forward(model, tokens.data(), batch);
}

// The logits of `count` rows of the hidden states, (count, V), on the host.
std::vector<float> gpt2_fetch_logits(GPT2& model, int64_t first_row, int64_t count) {
  gpt2_logits(model, first_row, count);
  const int64_t V = model.config.vocab_size, Vp = model.logit_stride;
  std::vector<floatX> padded(size_t(count * Vp));
  copy_to_host(padded.data(), model.acts.logits, padded.size() * sizeof(floatX));
  std::vector<float> logits;
  for (int64_t row = 0; row < count; row++)
    logits.insert(logits.end(), padded.begin() + row * Vp, padded.begin() + row * Vp + V);
  return logits;
}

// Puts a prompt into an empty slot, model.rows tokens at a time. Returns the logits (V) of its last token. With `act`
// N + R of its tokens are appended to `ponder`, unless that is null.
std::vector<float> gpt2_read_prompt(GPT2& model, int slot, const std::vector<int>& prompt,
                                    std::vector<float>* ponder = nullptr) {
  model.cache.clear(slot);
  int64_t count = 0;
  for (size_t begin = 0; begin < prompt.size(); begin += size_t(count)) {
    count = std::min(model.rows, int64_t(prompt.size() - begin));
    gpt2_extend(model, {prompt.begin() + long(begin), prompt.begin() + long(begin) + count}, {{slot, count}});
    if (ponder != nullptr) append_ponder(*ponder, model.acts, count);
  }
  return gpt2_fetch_logits(model, count - 1, 1);
}

// Continues `tokens` until there are `length` of them, in the cache's first slot. Every token goes through the model
// once. The n-th token is drawn with the n-th random number of (seed, step). Returns N + R of the tokens that went
// through the model, which are all but the last; nothing without `act`.
std::vector<float> gpt2_generate(GPT2& model, std::vector<int>& tokens, int length, const SamplingOptions& options,
                                 uint64_t seed, int64_t step) {
  CHECK(!tokens.empty());
  std::vector<float> ponder, logits = gpt2_read_prompt(model, 0, tokens, &ponder);
  while (int(tokens.size()) < length) {
    const double uniform = random_uniform(seed, RandomStream::sample, uint32_t(step), uint64_t(tokens.size()));
    tokens.push_back(sample_token(std::move(logits), uniform, options));
    if (int(tokens.size()) == length) break;
    gpt2_extend(model, {tokens.back()}, {{0, 1}});
    append_ponder(ponder, model.acts, 1);
    logits = gpt2_fetch_logits(model, 0, 1);
  }
  return ponder;
}

// ----------------------------------------------------------------------------
// Training

// A run of this model. What is declared later is destroyed first, while what it uses still exists.
struct Trainer {
  GPT2 model;
  std::optional<GPT2> sampler;    // on rank 0, if samples are asked for: the same weights, planned for generation
  PinnedBuffer<int> step_tokens;  // (2, 2, grad_accum_steps, B, T): inputs and targets of this step and the next
  // m and v (state), and on rank 0 the weights (parameters), which the writer reads while it writes a checkpoint.
  PinnedBuffer<float> checkpoint_copy;
  Run run;
  std::optional<StepLoader> step_loader;  // from the first step on
  int64_t counted_segment = -1;           // of the micro-step before, and its FLOPs per token
  double counted_flops = 0;
};

// What save_checkpoint copies to host memory for the writer: m and v of each rank that has a shard of them, or of rank
// 0, which also has all weights.
size_t checkpoint_copy_bytes(const GPT2& model, int rank) {
  if (rank > 0 && model.parameters.shard.count == 1) return 0;
  return (rank == 0 ? model.parameters.layout.bytes : 0) + 2 * model.state_bytes();
}

// `host_bytes`: what will be allocated in host memory for checkpoints. Throws UserError if the plan does not fit into
// what is free.
void print_memory(const GPT2& model, const PlanOptions& o, size_t host_bytes = 0) {
  // The workspaces have been allocated already.
  const size_t available = device_memory_available() + device_workspace_bytes();
  const size_t reserve = device_reserve_bytes(), beside = reserve + (device_memory_is_host_memory ? host_bytes : 0);
  auto plan_of = [&](int B) { return gpt2_memory(model.config, B, o); };
  const TrainingShape& shape = *model.training;
  printf("memory plan for B %d, T %d, recompute level %d:\n", shape.B, shape.T, int(shape.recompute));
  const MemoryPlan& memory = model.memory;
  const double bytes_per_sequence =
      double(model.activations.layout.bytes - memory[MemoryGroup::logits] - memory[MemoryGroup::muon]) / shape.B;
  print_memory_plan(memory,
                    {available, host_bytes, device_memory_is_host_memory, reserve, device_name(),
                     largest_micro_batch(available - std::min(available, beside), plan_of), bytes_per_sequence},
                    shape.recompute < Recompute::chunks);
}

// The mean loss over the scored tokens of ValidationBatches. It begins with an empty memory, and puts that of training
// aside. Returns false, on every rank, if one of them could not load its tokens: then it has no loss, and
// run.data_error of that rank says why.
bool validate_model(Trainer& t) {
  Run& run = t.run;
  GPT2& model = t.model;
  const double start = seconds_now();
  const ValidationBatches batches(*run.val, run.B, run.options.val_batches, run.ranks.rank, run.ranks.size);
  const double full_batch = double(run.B) * run.T;
  std::vector<int> inputs(size_t(run.B) * size_t(run.T)), targets(inputs.size());
  const std::vector<CheckpointTensor> of_training = fetch_memory(model.sublayers, run.B, model.remembered);
  model.remembered = 0;
  gpt2_zero_loss(model);
  try {
    for (int64_t i = 0; i < batches.count(); i++) {
      const auto [B, T] = batches.load(i, inputs.data(), targets.data());
      gpt2_forward_segments(model, inputs.data(), B, T);
      gpt2_loss(model, targets.data(), {B, T}, full_batch);
    }
  } catch (const UserError& e) { run.data_error = e.what(); }
  model.remembered = store_memory(model.sublayers, of_training);
  gpt2_request_stop(model, !run.data_error.empty());
  gpt2_sum_over_ranks(model, &model.acts.stats->loss, num_loss_sums + 1);
  const StepStats stats = gpt2_read_stats(model);
  if (stats.stop_requests > 0) return false;
  report_validation(run, {stats.mean(stats.loss, full_batch), stats.mean(stats.ponder, full_batch),
                          int64_t(stats.scored), int64_t(stats.tokens), int64_t(stats.correct), seconds_now() - start});
  return true;
}

void sample(Trainer& t) {
  Run& run = t.run;
  const WatchdogPause pause(run.channel);
  std::vector<int> tokens = run.prompt;
  t.model.await_all_weights();
  SamplingOptions sampling;
  sampling.temperature = run.options.temperature;
  if (run.tokenizer) sampling.vocabulary = run.tokenizer->vocab_size();
  const std::vector<float> ponder =
      gpt2_generate(*t.sampler, tokens, int(run.options.sample_length), sampling, uint64_t(run.options.seed), run.step);
  print_sample(run, tokens, ponder);
}

// Begins to write a checkpoint. Waits for the one before, and for a copy to host memory; the rest happens while
// training continues. Every rank that has a shard writes its own; the rest, and with --zero 0 all of it, is rank 0's.
void save_checkpoint(Trainer& t) {
  const double start = seconds_now();
  report_saved(t.run, /*wait=*/true);
  GPT2& model = t.model;
  std::vector<CheckpointTensor> memory = gather_memory(model.collectives, t.run.channel, t.run.ranks,
                                                       fetch_memory(model.sublayers, t.run.B, model.remembered));
  if (t.checkpoint_copy.size == 0) return;
  const size_t state_size = model.state_bytes() / sizeof(float);
  float *m = t.checkpoint_copy.data, *v = m + state_size, *weights = v + state_size;
  gpt2_gather_masters(model, weights);
  fetch_shard(model, model.m_memory, m);
  fetch_shard(model, model.v_memory, v);
  t.run.stall_seconds = seconds_now() - start;
  std::optional<int> end_of_text;
  if (t.run.tokenizer) end_of_text = t.run.tokenizer->end_of_text();
  std::vector<TextFile> files = model_text_files(model.config, end_of_text);
  start_checkpoint(t.run, model.parameters,
                   {{}, std::move(files), fetch_from_host(model, weights), m, v, std::move(memory)});
}

// This rank's tokens of the next step.
StepTokens next_tokens(Trainer& t) {
  Run& run = t.run;
  if (!t.step_loader) {
    const int64_t n = run.grad_accum_steps * run.B * run.T;
    int* memory = t.step_tokens.data;
    t.step_loader.emplace(*run.train, run.grad_accum_steps, run.B, run.ranks.rank, run.ranks.size,
                          std::array<StepTokens, 2>{{{memory, memory + n}, {memory + 2 * n, memory + 3 * n}}});
  }
  return t.step_loader->next();
}

// The FLOPs of a token of the next micro-step. With `memory` they depend on what there is of earlier segments.
double flops_of_next_segment(Trainer& t) {
  const int64_t segment = (t.model.remembered + t.run.T - 1) / t.run.T;
  if (std::exchange(t.counted_segment, segment) != segment)
    t.counted_flops = flops_per_token(t.model.config, t.model.attention_plan, t.run.T, {segment, segment + 1});
  return t.counted_flops;
}

// One update: grad_accum_steps micro-batches forward and backward, then AdamW. The host waits once, when all of it is
// queued. If the loss or the norm is not finite, the device has changed nothing. The step is skipped then: it counts
// for the data and the learning rate, which continue as if it had been a good one, but not as one of AdamW's updates,
// whose moments don't include it.
StepResult train_step(Trainer& t) {
  const double start = seconds_now();
  Run& run = t.run;
  GPT2& model = t.model;
  const TrainOptions& o = run.options;
  StepResult result = {};
  result.learning_rate = run.schedule(run.step + 1);
  model.timeline.start_step(run.step + 1);
  gpt2_zero_grad(model);
  gpt2_zero_loss(model);
  const double asked = seconds_now();
  const int64_t first_sequence = run.train->next_sequence;
  const StepTokens tokens = next_tokens(t);
  result.data_seconds = seconds_now() - asked;
  for (int64_t i = 0; i < run.grad_accum_steps; i++) {
    const int64_t first = i * run.B * run.T;
    if (run.train->begins_stream(first_sequence + i * run.B * run.ranks.size)) model.remembered = 0;
    result.flops_per_token += flops_of_next_segment(t) / double(run.grad_accum_steps);
    gpt2_micro_step(model, tokens.inputs + first, tokens.targets + first, run.B, run.T, run.num_micro_batches(),
                    i + 1 == run.grad_accum_steps);
  }
  // Without the tokens of the next step all ranks stop after this one, as they do after a signal.
  const double queued = seconds_now();
  if (run.step + 1 < run.steps) run.data_error = t.step_loader->error();
  result.data_seconds += seconds_now() - queued;
  gpt2_request_stop(model, stop_signal() != 0 || !run.data_error.empty());
  gpt2_update(model, run.step + 1 - run.skipped_steps,
              {result.learning_rate, o.beta1, o.beta2, o.eps, o.weight_decay, o.grad_clip, o.momentum});
  const StepStats stats = gpt2_read_stats(model);
  model.timeline.end_step();
  const double rows = double(run.B) * run.T;
  result.loss = stats.mean(stats.loss, rows), result.ponder = stats.mean(stats.ponder, rows);
  result.scored_tokens = int64_t(stats.scored), result.grad_norm = stats.grad_norm();
  result.stop_requested = stats.stop_requests > 0;
  result.skipped = !std::isfinite(stats.loss) || !std::isfinite(result.grad_norm);
  if (result.skipped) model.remembered = 0;  // what is not finite would stay in the memory
  count_step(run, result);
  result.seconds = seconds_now() - start;
  return result;
}

// The spans of the step before the last one: by now collectives are done that run beside the step after theirs.
void log_timeline(Trainer& t) {
  const Timeline& timeline = t.model.timeline;
  if (timeline.previous_step() < 0) return;
  for (const TimelineSpan& span : timeline.previous_spans())
    t.run.log.write({{"step", timeline.previous_step()},
                     {"span", std::string(span.what)},
                     {"of", t.model.parameters.buckets[span.bucket].name},
                     {"begin_ms", span.begin_ms},
                     {"end_ms", span.end_ms}});
}

void train(Trainer& t) {
  Run& run = t.run;
  const TrainOptions& o = run.options;
  run.first_step = run.step;
  if (run.step == 0 && run.val && o.val_every > 0 && !validate_model(t)) return;
  if (t.sampler && run.step == run.steps) sample(t);  // nothing to train: -x 0, or a finished run resumed
  for (bool stopping = run.ranks.size == 1 && stop_signal() != 0; run.step < run.steps && !stopping;) {
    const StepResult result = train_step(t);
    report_step(run, result);
    log_timeline(t);
    check_progress(run, result);
    stopping = must_stop(run, result);
    if (run.val && due(run, o.val_every) && !stopping) stopping = !validate_model(t);
    if (t.sampler && due(run, o.sample_every) && !stopping) sample(t);
    stopping = stopping || must_stop(run, result);
    if (checkpoint_due(run, result, stopping)) save_checkpoint(t);
    report_saved(run, /*wait=*/false);
  }
  // The last step's weights are awaited by no forward pass.
  t.model.timeline.start_step(run.step + 1);
  t.model.collectives.wait();
  log_timeline(t);
}

// ----------------------------------------------------------------------------
// main

// The log's description of the run.
LogFields describe(const Trainer& t) {
  LogFields fields;
  visit_fields(t.model.config, [&](const ConfigField& field, const auto& value) {
    if constexpr (std::is_same_v<decltype(value), const int&>) fields.push_back({field.name, int64_t(value)});
    else fields.push_back({field.name, value});
  });
  fields.push_back({"wiring", t.model.config.wiring.text});
  fields.push_back({"num_parameters", t.model.parameters.num_parameters});
  for (LogField& field : describe_run(t.run)) fields.push_back(std::move(field));
  fields.push_back({"precision", std::string(precision_name)});
  fields.push_back({"device", std::string(device_name())});
  fields.push_back({"kv_bytes_per_token", kv_bytes_per_token(t.model.config, t.model.attention_plan, sizeof(floatX))});
  fields.push_back({"memory", memory_fields(t.model.memory)});
  return fields;
}

// The checksum of the weights in the folder of -e; "" if they are not there any more, nor needed.
std::string model_checksum(const std::string& folder, bool is_needed) {
  try {
    return crc32c_hex(weights_checksum(folder));
  } catch (const UserError&) {
    if (is_needed) throw;
    return "";
  }
}

// Everything that can be wrong is found here, before anything is written. Returns the checkpoint to resume from, or "".
// `in_folder`: the model in the folder that -e names.
std::string check_and_plan(Trainer& t, std::optional<ModelConfig>& in_folder) {
  Run& run = t.run;
  const TrainOptions& o = run.options;
  run.channel.check_same_on_all_ranks("options", o.as_toml);
  const std::string checkpoint = run.channel.broadcast(run.ranks.rank == 0 ? checkpoint_to_resume(run) : "");
  if (!checkpoint.empty())
    run.channel.check_same_on_all_ranks("the checkpoint's checksum", checkpoint_checksum(checkpoint));
  ModelOptions model = o.model;
  if (!checkpoint.empty() && !names_a_model(model.model)) {  // the checkpoint has all of the model
    if (run.ranks.rank == 0)
      print_warning(format("-e %s: is not there; the model is %s's", model.model.c_str(), checkpoint.c_str()));
    model.model = checkpoint;
  }
  const ModelConfig config = model_config(model, in_folder);
  if (!checkpoint.empty()) check_resumed_model(checkpoint, config);
  if (in_folder && !o.out.empty() && run.ranks.rank == 0)
    run.model_checksum = model_checksum(o.model.model, /*is_needed=*/checkpoint.empty());
  plan_batches(run, config.max_seq_len, in_folder.has_value(), memory_positions(config.wiring) > 0);
  open_data(run, !checkpoint.empty() ? checkpoint : in_folder ? o.model.model : "", config.vocab_size);
  t.model.collectives.init(run.ranks, run.channel);  // selects the GPU; and no rank writes before all have looked
  PlanOptions plan = {run.B, run.T, Recompute(o.recompute), o.keep_dead_kv};  // asks the GPU for its memory
  plan.muon = o.optimizer == "muon";
  if (o.zero == 1) plan.shard = {run.ranks.rank, run.ranks.size, /*whole_matrices=*/plan.muon};
  const double state_of_each = (has_master_weights ? 3.0 : 2.0) * sizeof(float) / plan.shard.count;  // masters, m and v
  check_parameters_fit(config, sizeof(floatX) + sizeof(float) + state_of_each, "weights, gradients and moments",
                       device_memory_available() + device_workspace_bytes(), device_name());
  if (o.sample_every > 0 && run.ranks.rank == 0) {  // all ranks have the same weights
    gpt2_declare_generation(t.sampler.emplace(), config, generation_options(1, o.sample_length, plan));
    plan.sampling_bytes =
        t.sampler->memory.total() - t.sampler->memory[MemoryGroup::weights] - device_workspace_bytes();
  }
  gpt2_declare(t.model, config, plan);
  if (o.tf32) gemm_allow_tf32();
  t.model.timeline.on = o.log_level == "debug";
  run.flops_per_token = flops_per_token(config, t.model.attention_plan, run.T, {0, segments_of_stream(run)});
  print_model(t.model, run.T, t.model.parameters);
  if (checkpoint.empty() && in_folder && !same_model(*in_folder, config))
    printf("%s was trained with the wiring %s and continues with %s; what changes:\n%s", o.model.model.c_str(),
           in_folder->wiring.text.c_str(), config.wiring.text.c_str(),
           describe(plan_wiring_change(*in_folder, t.model.attention_plan)).c_str());
  print_memory(t.model, plan, o.out.empty() ? 0 : checkpoint_copy_bytes(t.model, run.ranks.rank));
  resume_progress(run, checkpoint, describe(t));
  return checkpoint;
}

void allocate(Trainer& t) {
  const Run& run = t.run;
  gpt2_allocate(t.model);
  if (t.sampler) gpt2_allocate(*t.sampler, &t.model);
  t.step_tokens = PinnedBuffer<int>(4 * size_t(run.grad_accum_steps * run.B * run.T));
  const size_t copy_bytes = run.options.out.empty() ? 0 : checkpoint_copy_bytes(t.model, run.ranks.rank);
  if (copy_bytes > 0) t.checkpoint_copy = PinnedBuffer<float>(copy_bytes / sizeof(float));
}

// Weights, moments and progress: as a checkpoint left them, or a model's folder, or new ones.
void load_or_init_weights(Trainer& t, const std::optional<ModelConfig>& in_folder, const std::string& checkpoint) {
  GPT2& model = t.model;
  if (!checkpoint.empty()) {
    read_weight_files(weight_files(checkpoint), model.parameters, store_weights(model));
    read_moments(checkpoint, model.parameters, store_shard(model, model.m_memory), store_shard(model, model.v_memory));
    if (!t.run.options.reset_memory)
      model.remembered =
          store_memory(model.sublayers, memory_of_rank(read_memory(checkpoint), t.run.ranks.rank, t.run.B));
  } else if (in_folder) {
    read_weights_of(model, model, t.run.options.model.model, *in_folder, uint64_t(t.run.options.seed));
  } else {
    init_weights(model, uint64_t(t.run.options.seed));
  }
}

void finalize(Trainer& t) {
  t.model.collectives.finalize();
  t.run.channel.finalize();
  finalize_ranks(t.run.ranks);
}

int run_trainer(int argc, char** argv, Trainer& t) {
  Run& run = t.run;
  if (!parse_options(argc, argv, run.options)) return 0;
  handle_stop_signals();  // before MPI and others have threads, which would be given the signals
  run.ranks = init_ranks(run.options.ranks);
  Collectives::check_supported(run.ranks);
  if (run.ranks.rank > 0 && freopen("/dev/null", "w", stdout) == nullptr)
    user_error("cannot open /dev/null");  // only rank 0 prints
  run.channel.open(run.ranks, run.options.hang_timeout);
  std::optional<ModelConfig> in_folder;
  const std::string checkpoint = check_and_plan(t, in_folder);
  if (run.options.dry_run) return finalize(t), 0;
  if (run.ranks.rank == 0)
    run.gemm_peak = gemm_peak(0.3);  // before the plan is allocated: its matrices take 400 MB on a large GPU
  allocate(t);
  load_or_init_weights(t, in_folder, checkpoint);
  stop_after_steps();
  open_output(run, checkpoint, describe(t));
  check_same_data(run);  // also so that no rank waits in a collective for one that still loads
  print_start(run, checkpoint, matmul_precision());

  const double start = seconds_now();
  try {
    train(t);
  } catch (const UserError&) {
    try {
      finish_output(run);
    } catch (const UserError& e) {
      print_error(e.what());  // the first error is the one that the run ends with
    }
    throw;
  }
  finish_output(run);
  share_data_error(run);
  finalize(t);
  return finish_run(run, seconds_now() - start);
}

#ifndef SLA_NO_MAIN
int main(int argc, char** argv) {
  std::optional<Trainer> t;  // stays while an error is told: to free a GPU's memory waits for collectives, which may
                             // never end
  auto train = [&] {
    configure_threads(argv);
    return run_trainer(argc, argv, t.emplace());
  };
  return run_program(train, ReaderGone::is_ignored, [&](const std::string& error) {
    if (t && t->run.channel.is_open()) t->run.channel.end_run(error);
  });
}
#endif
