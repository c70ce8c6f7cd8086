// GPT-2 with skip-layer attention (SLA). Read from top to bottom it is: the model's memory; the forward pass; the
// backward pass; the update; generation; main. What the model consists of is in llmc/model/ (gpt2.h), the training run
// that main starts in llmc/train/training.h.
//
// The passes are written once. What they call (matmul_forward, attention_backward, ...) is a set of operations of the
// same names and signatures for each kind of device: llmc/cuda/ for a GPU (and for dev/emu, which runs the same kernels
// without one), llmc/cpu/ for the host. What a job needs and a model does not know (options, data, log, checkpoints,
// what is printed) is in llmc/train/.
//
// B: sequences in a micro-batch, T: their length, N: rows, B T in training, C: channels, L: layers, h: heads, hs: head
// size, V: vocabulary, QKV: q, k and v of one token in one layer, hs * (heads of q, k and v that the layer projects).
// A bucket: the embeddings, a layer, or the last norm (with `untied` and lm_head), whose gradients ranks sum in one
// piece. A shard: the part of all buckets that one rank updates. A draw: what an update's random choices follow from,
// for dropout and `route`.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>
#include "llmc/model/gpt2.h"
#include "llmc/model/stream_memory.h"
#include "llmc/ops/precision.h"
#include "llmc/base/error.h"
#include "llmc/base/random.h"
#ifndef SLA_LINKED_MODEL  // with it, another object file has the functions below

// ----------------------------------------------------------------------------
// The model's memory

// What training and generation have in common.
void declare_model(GPT2& model, const ModelConfig& config, bool keep_dead_kv, const Shard& shard) {
  validate(config);
  if (config.head_size() % head_size_multiple != 0 || config.head_size() > largest_head_size)
    user_error("%d channels in %d heads: a head has %d, but must have a multiple of %d and at most %d here",
               config.channels, config.num_heads, config.head_size(), head_size_multiple, largest_head_size);
  if (config.hidden_size() % head_size_multiple != 0)
    user_error("wiring \"%s\": %lld hidden units in an MLP must be a multiple of %d here", config.wiring.given,
               (long long)config.hidden_size(), head_size_multiple);
  const WiringTable table = config.whole_model();
  if (const char* what =
          without_kernels(table.topk > 0, table.lsh_buckets > 0, table.relative, int64_t(config.head_size())))
    user_error("wiring \"%s\": %s in fp16 needs more shared memory than a block of %s has; leave it out, or build with "
               "PRECISION=FP32",
               config.wiring.given, what, device_name());
  if (config.channels > largest_channels) user_error("%d channels: at most %d here", config.channels, largest_channels);
  model.config = config;
  model.attention_plan = make_attention_plan(config, keep_dead_kv);
  model.parameters = make_parameter_table(config, model.attention_plan, shard);
  model.buckets_awaited = model.parameters.buckets.size();
  model.logit_stride = padded_vocab_size(config);  // columns are whole tiles, with zeros where the vocabulary ends
  model.memory_plan = {};
  model.memory_plan[MemoryGroup::weights] = model.weight_bytes() + model.constant_bytes();
  model.memory_plan[MemoryGroup::workspaces] = device_workspace_bytes();
}

// How many of `rows` rows of logits a chunk of at most logit_bytes has (logit_chunk_rows).
int64_t planned_logit_rows(const ModelConfig& config, int64_t rows, int64_t logit_bytes) {
  return logit_chunk_rows(rows, padded_vocab_size(config) * int64_t(sizeof(floatX)), logit_bytes);
}

// The most sequences of T tokens that the device's kernels take.
int most_sequences(const ModelConfig& config, int64_t T) {
  return int(std::min<int64_t>(largest_batch, largest_rows / (config.wiring_table().memory + T)));
}

void declare_activations(GPT2& model) {
  model.activations = ActivationArena();
  ActivationList list(model, model.activations, model.memory_plan);
  declare(model.acts, list);
  declare(model.sublayers, list);
  declare(model.muon, list);
  list.place_buffers();
}

// Throws UserError for what there is no dropout for.
void check_dropout(const ModelConfig& config, double p) {
  if (p == 0) return;
  const WiringTable table = config.wiring_table();
  const bool has_relative = table.relative && !relative_attention_has_dropout;
  const char* const term = table.topk > 0          ? "topk"
                           : table.memory > 0      ? "memory"
                           : table.lsh_buckets > 0 ? "lsh"
                           : table.reversible      ? "reversible"
                           : has_relative          ? "relative on a GPU"
                                                   : nullptr;
  if (term != nullptr)
    user_error("--dropout %g: it does not go with %s; wiring \"%s\" has that; leave one of them out", p, term,
               config.wiring.given);
}

// Fixes the model's shape and declares its tensors for training, without allocating any of them. Throws UserError for a
// shape that the device's kernels don't take.
void gpt2_declare(GPT2& model, const ModelConfig& config, const PlanOptions& o) {
  CHECK(1 <= o.B && 1 <= o.T && o.T <= config.max_seq_len && o.recompute < Recompute::above_all_levels);
  CHECK(!o.muon || o.shard.count == 1 || o.shard.whole_matrices);
  declare_model(model, config, o.keep_dead_kv, o.shard);
  if (const int most = most_sequences(config, o.T); o.B > most)
    user_error("%d sequences of %d tokens in a micro-batch: at most %d here; take a smaller -b", o.B, o.T, most);
  model.rows = int64_t(o.B) * o.T;
  model.training = {o.B, o.T, recompute_level(model.attention_plan, o.recompute)};
  check_dropout(config, o.dropout);
  model.training->dropout = o.dropout;
  if (o.muon) {
    model.training->matrices = muon_matrices(model.parameters);
    model.training->batches = make_muon_batches(model.training->matrices, o.muon_elements);
  }
  model.logit_rows = planned_logit_rows(config, model.rows, o.logit_bytes);
  model.sublayers = make_sublayers(config, model.attention_plan);
  declare_recomputation(model.sublayers, model.training->recompute);
  model.memory_plan[MemoryGroup::master_weights] = has_master_weights ? model.state_bytes() : 0;
  model.memory_plan[MemoryGroup::gradients] = model.parameters.layout.bytes;
  model.memory_plan[MemoryGroup::moments] = 2 * model.state_bytes();
  model.memory_plan[MemoryGroup::sampling] = o.sampling_bytes;
  declare_activations(model);
}

// Fixes the model's shape and declares its tensors for generation: no gradients and no optimizer, a K/V cache, and
// activations that all layers share.
void gpt2_declare_generation(GPT2& model, const ModelConfig& config, const GenerationOptions& o) {
  CHECK(1 <= o.slots && o.slots <= o.rows && 1 <= o.max_length && o.max_length <= config.longest_text());
  declare_model(model, config, o.keep_dead_kv, o.shard);
  mask_beyond_segment_memory(model.attention_plan, config.max_seq_len, o.max_length);
  model.rows = o.rows;
  model.generation = plan_kv_cache(model.attention_plan, o.slots, o.max_length, o.rows);
  model.cache = KVCache(*model.generation);
  model.sublayers = make_sublayers(config, model.attention_plan, /*is_generation=*/true);
  const int64_t logit_rows = planned_logit_rows(config, o.losses ? o.rows : o.slots, o.logit_bytes);
  model.logit_rows = std::max<int64_t>(logit_rows, o.slots);  // a pass that draws fetches its logits at once
  declare_activations(model);
}

// The plan of the memory that micro-batches of B sequences would take; nothing is allocated.
MemoryPlan gpt2_memory_plan(const ModelConfig& config, int B, PlanOptions o) {
  GPT2 model;
  o.B = B;
  gpt2_declare(model, config, o);
  return model.memory_plan;
}

// In fp16: from now on the losses of the backward pass, and with them all gradients, are multiplied by `scale`, which
// gpt2_update undoes. Waits for the device.
void gpt2_set_loss_scale(GPT2& model, double scale) {
  model.loss_scale = scale;
  copy_to_device(&model.acts.stats->loss_scale, &scale, sizeof scale);
}

// Writes the constants into the activations.
void set_constants(GPT2& model) {
  set_constants(model.acts, model);
  if (is_fp16) gpt2_set_loss_scale(model, model.loss_scale);
}

// Sets every byte of the activations, then the constants again. Uploads that follow wait for this.
void gpt2_fill_activations(GPT2& model, int value) {
  device_memset(model.activation_memory, value, model.activations.layout.bytes);
  set_constants(model);
  uploads_wait_for_compute();
}

// Copies the lists of what the optimizers update, chunks and matrices, to the device.
void allocate_chunks(GPT2& model) {
  std::vector<MuonMatrix>& matrices = model.training->matrices;
  std::vector<ParameterChunk> chunks = parameter_chunks(model.parameters, /*muon=*/!matrices.empty());
  model.num_adamw_chunks = int64_t(chunks.size());
  append_chunks(chunks, matrices);
  model.chunks = DeviceArray<ParameterChunk>(chunks);
  model.matrices = DeviceArray<MuonMatrix>(matrices);
}

// Allocates what has been declared, and binds all pointers to it. Weights, gradients and moments are zero; with
// `weights_of` the model uses that model's weights instead. A build that checks (make DEBUG=1, dev/emu) fills the
// activations with NaN, so that one that is read before it is written shows.
void gpt2_allocate(GPT2& model, const GPT2* weights_of) {
  auto pointers = [&](auto* arena) {
    return parameter_pointers(model.config, model.attention_plan, model.parameters, arena, model.constant_memory);
  };
  if (weights_of == nullptr) model.allocate_weights();
  else model.use_weights_of(*weights_of);
  if (model.training) {
    model.allocate_training_state();
    allocate_chunks(model);
  }
  model.params = pointers(model.weight_memory), model.grads = pointers(model.grad_memory);
  model.activation_memory = static_cast<char*>(device_malloc(model.activations.layout.bytes));
  uploads_wait_for_compute();
  model.activations.layout.forbid_gaps(model.activation_memory);
  model.activations.bind(model.activation_memory);
  set_constants(model);
#if defined(SLA_DEBUG) || defined(SLA_EMU)
  gpt2_fill_activations(model, 0xff);  // all ones: NaN as float, bf16 and fp16
#endif
  model.host_stats = PinnedBuffer<StepStats>(1);
  bind_sublayers(model.sublayers, model, model.params, model.grads, model.acts,
                 model.generation ? &model.cache : nullptr);
}

// ----------------------------------------------------------------------------
// Forward
//
// What plain GPT-2 calls, with the weights' names in GPT-2's files; a wiring changes what a line calls, not the list:
//
//   embedding_forward                       embedded = wte[tokens] + wpe[positions]
//   layernorm_forward                       ln_1 of layer 0
//   for each layer:
//     matmul_forward                        q, k, v: attn.c_attn
//     attention_forward
//     matmul_forward                        attn.c_proj
//     residual_layernorm_forward            stream += that; ln_2
//     matmul_activation_forward             mlp.c_fc, GELU
//     matmul_forward                        mlp.c_proj
//     residual_layernorm_forward            stream += that; ln_1 of the next layer, or ln_f
//   for each chunk of rows: matmul_forward  logits: wte
//                           classifier      losses; in training the logits become their gradients
//
// The backward pass calls the operations' *_backward in the reverse order.

// The residual stream and the norm after it, from what sublayer i - 1, or the embedding, left there.
void gpt2_forward_sublayer(GPT2& model, int i, const Batch& batch) {
  const Sublayer& sublayer = model.sublayer(i);
  const Timeline::Scope span = model.timeline.span("forward", sublayer.bucket);
  std::visit([&](const auto& branch) { branch_forward(branch, batch); }, sublayer.branch);  // its out =
  residual_and_norm_forward(sublayer, model.norm(i + 1), batch);  // the residual stream after it, and what follows
}

// Computes the final hidden states, last_norm.out (N, C), of acts.tokens (N), where N is batch.rows().
void gpt2_forward(GPT2& model, const Batch& batch) {
  CHECK(1 <= batch.rows() && batch.rows() <= model.rows && batch.T <= model.config.max_seq_len);
  CHECK(batch.spans.empty() == model.training.has_value());
  const Activations& a = model.acts;
  if (a.last_queries != nullptr)
    document_bounds(a.first_keys, a.last_queries, a.tokens, model.config.end_of_text, batch.B, batch.T);
  embed(model.sublayers, model.embeddings(), model.acts, batch);
  norm_forward(model.norm(0), batch.rows());
  for (int i = 0; i < model.sublayers.size(); i++) gpt2_forward_sublayer(model, i, batch);
}

// Computes the final hidden states, last_norm.out (N, C), of `tokens` (N) in host memory, which are copied to
// acts.tokens.
void gpt2_forward(GPT2& model, const int* tokens, const Batch& batch) {
  CHECK(batch.rows() <= model.rows);
  copy_to_device(model.acts.tokens, tokens, size_t(batch.rows()) * sizeof(int));
  gpt2_forward(model, batch);
}

// Computes the hidden states of the next T tokens of B streams, and advances their segment memory by these.
void gpt2_forward_segments(GPT2& model, const int* tokens, int64_t B, int64_t T) {
  const Batch batch = batch_of_segments(B, T, model.remembered);
  route_heads(model.sublayers, model.attention_plan, nullptr);
  gpt2_forward(model, tokens, batch);
  remember(model.sublayers, batch);
  model.remembered = remembered_after(model.attention_plan.table.memory, batch);
}

// acts.losses (B, T) = cross-entropy of acts.targets, in nats, and 0 where they are not_scored; acts.stats->loss +=
// their sum / divisor. With `backward` also the head's gradients of batch.dloss * sum(losses): the hidden states'
// gradient =, and the weight's +=. Without it acts.correct (B, T) =, and is counted.
void gpt2_loss(GPT2& model, const Batch& batch, double divisor, bool backward) {
  const int64_t N = batch.rows(), V = model.config.vocab_size;
  const Activations& acts = model.acts;
  uint8_t* correct = backward ? nullptr : acts.correct;
  for (int64_t row = 0; row < N; row += model.logit_rows) {
    const int64_t count = std::min(model.logit_rows, N - row);
    head_forward(model.head(), row, count);
    classifier({acts.losses + row, acts.logits, acts.targets + row, count, V, model.logit_stride, batch.dloss, backward,
                backward ? nullptr : correct + row, model.head().cap, LossScaleView(acts.stats)});
    if (backward) head_backward(model.head(), row, count);
  }
  add_losses(acts.stats, {acts.losses, model.sublayers.ponder, correct, acts.targets, N, divisor});
}

// The losses of `targets` (B, T), on the host, without gradients.
void gpt2_loss(GPT2& model, const int* targets, const Batch& batch, double divisor) {
  copy_to_device(model.acts.targets, targets, size_t(batch.rows()) * sizeof(int));
  gpt2_loss(model, batch, divisor, /*backward=*/false);
}

// What losses add to in acts.stats = 0.
void gpt2_zero_loss(GPT2& model) { device_memset(&model.acts.stats->loss, 0, num_loss_sums * sizeof(double)); }

// What gpt2_loss has added up since gpt2_zero_loss, and what gpt2_update found. Waits for the device.
StepStats gpt2_read_stats(GPT2& model) {
  copy_to_host(model.host_stats.data, model.acts.stats, sizeof(StepStats));
  return *model.host_stats.data;
}

// ----------------------------------------------------------------------------
// Backward

// Starts to sum a bucket's gradients over the ranks, beside the operations that follow. Each rank gets the sums of its
// own shard, or, with one shard, all sums.
void gpt2_reduce_bucket(GPT2& model, size_t index) {
  const ParameterBucket& bucket = model.parameters.buckets[index];
  Collectives& c = model.collectives;
  c.comm_waits_for_compute();
  const Timeline::Scope span = model.timeline.span("reduce", index, &c);
  if (model.parameters.shard.count > 1) c.reduce_to_owners(model.grad_memory, bucket);
  else c.all_reduce(model.grad_memory + bucket.begin, bucket.count);
}

// grads += the gradients of what gpt2_forward and gpt2_loss computed last. The head has left the gradient of the
// final hidden states. Tied weights have two writers: gpt2_loss has added the head's gradient to wte's, and
// embed_backward adds the embeddings'. With `sum_over_ranks` a bucket's gradients are summed as soon as they are
// complete.
void gpt2_backward(GPT2& model, const Batch& batch, bool sum_over_ranks) {
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
    sublayer_backward(sublayer, batch);          // the norm's dout =, from acts.dresidual
    norm_backward(sublayer.norm, batch.rows());  // acts.dresidual +=
    for (int bucket : sublayer.completes) complete(bucket);
  }
  embed_backward(sublayers, model.grads, model.acts, batch);
  complete(model.params.embedding_bucket);
}

// grads = 0.
void gpt2_zero_grad(GPT2& model) { device_memset(model.grad_memory, 0, model.parameters.layout.bytes); }

// Computes both passes on the micro-batch in acts.tokens and acts.targets: acts.stats->loss += its mean loss, grads +=
// the gradients of batch.dloss * sum(losses). Then the layers remember it.
void gpt2_forward_backward(GPT2& model, const Batch& batch, bool sum_over_ranks) {
  gpt2_forward(model, batch);
  gpt2_loss(model, batch, double(batch.rows()), /*backward=*/true);
  gpt2_backward(model, batch, sum_over_ranks);
  remember(model.sublayers, batch);
}

// Copies a micro-batch (B, T) to the device, and sets what its dropout is drawn by. Waits for nothing: where inputs and
// targets are a PinnedBuffer's, the caller leaves them as they are until gpt2_read_stats has returned.
void upload_micro_batch(GPT2& model, const int* inputs, const int* targets, int B, int T) {
  const Activations& a = model.acts;
  const size_t count = size_t(B) * size_t(T);
  upload({{a.tokens, a.staged_tokens, inputs, count}, {a.targets, a.staged_targets, targets, count}});
  const UpdateDraw& draw = model.draw;
  if (model.training->dropout > 0) set_dropout_keys(a.dropout_keys, B, draw.seed, draw.update, draw.first_sequence);
}

// One micro-batch of an update that averages `num_micro_batches` of them, over all ranks: acts.stats->loss and grads +=
// as in gpt2_forward_backward. dloss is computed as if all tokens of the micro-batch were scored, so that it is the
// same in each; gpt2_update multiplies by StepStats::grad_weight where not all are. Waits for nothing, but with `route`
// for each layer whose source has changed. A rank's last micro-batch also sums the gradients over the ranks, and its
// first one also receives weights from them. These two run eagerly, because they take two streams, and so do all whose
// timeline is recorded. The others are captured and replayed as a CUDA graph.
void gpt2_micro_step(GPT2& model, const int* inputs, const int* targets, int B, int T, int64_t num_micro_batches,
                     bool last) {
  CHECK(1 <= B && 1 <= T && int64_t(B) * T <= model.rows);
  route_heads(model.sublayers, model.attention_plan, &model.draw);
  upload_micro_batch(model, inputs, targets, B, T);
  const float dloss = float(1.0 / (double(B) * T * double(num_micro_batches)));
  const bool sum_over_ranks = last && model.collectives.size() > 1;
  auto forward_backward = [&](int b, int t, int64_t remembered, float d) {
    Batch batch = batch_of_segments(b, t, remembered, d);
    batch.drops = model.training->dropout > 0;
    gpt2_forward_backward(model, batch, sum_over_ranks);
  };
  if (sum_over_ranks || model.weights_are_arriving() || model.timeline.on)
    forward_backward(B, T, model.remembered, dloss);
  else model.forward_backward.run(forward_backward, B, T, model.remembered, dloss);
  model.remembered = remembered_after(model.attention_plan.table.memory, batch_of_segments(B, T, model.remembered));
}

// x (count) = its sum over ranks. x is in acts.stats, whose doubles lie side by side.
void gpt2_sum_over_ranks(GPT2& model, double* x, int64_t count) {
  model.collectives.comm_waits_for_compute();
  model.collectives.all_reduce(x, count);
  model.collectives.compute_waits_for_comm();
}

// What gpt2_loss has added up, and after it what ranks tell each other, become sums over the ranks.
void gpt2_sum_losses_over_ranks(GPT2& model) {
  gpt2_sum_over_ranks(model, &model.acts.stats->loss, num_loss_sums + num_flags);
}

// Sets or clears this rank's flag in acts.stats. After the next sum over ranks it is positive on each rank if any has
// set it, so that all act on it after the same step.
void gpt2_set_flag(GPT2& model, double StepStats::*flag, bool is_set) {
  double& place = model.acts.stats->*flag;
  device_memset(&place, is_set ? 0x3f : 0, sizeof place);  // eight bytes 0x3f are a small positive number
}

// ----------------------------------------------------------------------------
// Update

// acts.stats->grad_squares = the square of the 2-norm of the gradients in this rank's shard.
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

// Muon's part of an update, by the numbers in muon.step. u (ops/muon.h), from which the iteration starts, overwrites
// the gradient.
void gpt2_muon_update(GPT2& model) {
  const MuonArgs args = {model.weight_memory,
                         model.grad_memory,
                         model.master_memory,
                         model.m_memory,
                         model.chunks.data + model.num_adamw_chunks,
                         int64_t(model.chunks.size) - model.num_adamw_chunks,
                         model.matrices.data,
                         int64_t(model.matrices.size),
                         model.muon.squares,
                         model.muon.step,
                         model.acts.stats};
  muon_momentum(args);
  for (const MuonBatch& batch : model.training->batches) update_by_muon(model.muon, args, batch);
}

// Update number `step`, from 1, by AdamW, and for the matrices that are planned so by Muon. Gradients are clipped by
// their norm on the way: AdamW does not write them; weights of two or more dimensions decay. Changes nothing if the
// loss or the norm is not finite: gpt2_read_stats tells. Waits for nothing. Every rank takes the same decision and has
// the same weights afterwards: acts.stats becomes the sum over ranks before anything depends on it.
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
  if (is_sharded) gpt2_sum_over_ranks(model, &model.acts.stats->grad_squares, 1 + num_loss_sums + num_flags);
  else gpt2_sum_losses_over_ranks(model);  // each rank has all gradients
  adamw_update(model.weight_memory, has_master_weights ? model.master_memory : nullptr, model.m_memory, model.v_memory,
               model.grad_memory, model.chunks.data, model.num_adamw_chunks, s, model.acts.stats);
  if (!model.training->matrices.empty()) {
    muon_set_step(model.muon.step, {s.learning_rate, float(o.momentum), s.weight_decay, s.grad_clip});
    model.matrix_update.run([&] { gpt2_muon_update(model); });
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

// Computes the next `tokens` of sequences in the K/V cache, one sequence after the other: their hidden states are rows
// [0, tokens). `counts`: pairs of a slot and its number of tokens; at most model.rows tokens in all.
void gpt2_extend(GPT2& model, const std::vector<int>& tokens, const std::vector<std::pair<int, int64_t>>& counts) {
  Batch batch;
  std::vector<KVCacheMove> moves;
  for (const auto& [slot, count] : counts) batch.spans.push_back(model.cache.append(slot, count, moves));
  CHECK(int64_t(tokens.size()) == batch.rows());
  for (const KVCacheMove& move : moves)
    if (const auto* kv = find_stage<StoreKV>(attention_of_layer(model.sublayers, move.layer).stages))
      copy_rows({kv->row(move.slot, 0), kv->width, kv->row(move.slot, move.from), kv->width, kv->width}, move.count);
  const CachedRows where(model.cache, batch.spans);
  const Activations& a = model.acts;
  set_positions(a, model, where.positions);
  copy_to_device(a.cache_rows, where.rows);
  copy_to_device(a.sequences, where.sequences);
  if (a.first_keys != nullptr)
    copy_to_device(a.first_keys,
                   model.cache.first_keys(batch.spans, tokens.data(), model.config.end_of_text, model.rows));
  batch.positions_of_spans = a.positions;
  gpt2_forward(model, tokens.data(), batch);
}

// The logits of `count` rows of the hidden states, (count, V), on the host.
std::vector<float> gpt2_fetch_logits(GPT2& model, int64_t first_row, int64_t count) {
  head_forward_capped(model.head(), first_row, count);
  const int64_t V = model.config.vocab_size, Vp = model.logit_stride;
  std::vector<floatX> padded(size_t(count * Vp));
  copy_to_host(padded.data(), model.acts.logits, padded.size() * sizeof(floatX));
  std::vector<float> logits;
  for (int64_t row = 0; row < count; row++)
    logits.insert(logits.end(), padded.begin() + row * Vp, padded.begin() + row * Vp + V);
  return logits;
}

// Puts a prompt into an empty slot, model.rows tokens at a time. Returns the logits (V) of its last token. With `act`
// how many cycles its tokens ran is appended to `ponder`, unless that is null.
std::vector<float> gpt2_read_prompt(GPT2& model, int slot, const std::vector<int>& prompt, std::vector<float>* ponder) {
  model.cache.clear(slot);
  int64_t count = 0;
  for (size_t begin = 0; begin < prompt.size(); begin += size_t(count)) {
    count = std::min(model.rows, int64_t(prompt.size() - begin));
    gpt2_extend(model, {prompt.begin() + long(begin), prompt.begin() + long(begin) + count}, {{slot, count}});
    if (ponder != nullptr) append_ponder(*ponder, model.sublayers, count);
  }
  return gpt2_fetch_logits(model, count - 1, 1);
}

// Continues `tokens` until there are `length` of them, in the cache's first slot. All but the last go through the
// model, once. The n-th token is drawn with the n-th random number of (seed, step). Returns how many cycles those that
// went through the model ran; nothing without `act`, or if there are as many.
std::vector<float> gpt2_generate(GPT2& model, std::vector<int>& tokens, int length, const SamplingOptions& options,
                                 uint64_t seed, int64_t step) {
  CHECK(!tokens.empty());
  if (int(tokens.size()) >= length) return {};
  std::vector<float> ponder, logits = gpt2_read_prompt(model, 0, tokens, &ponder);
  while (true) {
    const double uniform = random_uniform(seed, RandomStream::sample, uint32_t(step), uint64_t(tokens.size()));
    tokens.push_back(sample_token(std::move(logits), uniform, options));
    if (int(tokens.size()) == length) return ponder;
    gpt2_extend(model, {tokens.back()}, {{0, 1}});
    append_ponder(ponder, model.sublayers, 1);
    logits = gpt2_fetch_logits(model, 0, 1);
  }
}

#endif
// ----------------------------------------------------------------------------
// main

#ifndef SLA_NO_MAIN
#include "llmc/train/training.h"
#include "llmc/base/program.h"

int main(int argc, char** argv) {
  std::optional<Trainer> t;  // outlives an error's report: freeing a GPU's memory waits for collectives, which may
                             // never end
  auto train = [&] {
    configure_threads(argv);
    return run_trainer(argc, argv, t.emplace());
  };
  return run_program(train, ReaderGone::is_ignored, [&](const std::string& error) {
    if (t && t->run.ranks.size > 1) end_rank(t->run, error);
  });
}
#endif
