// The model: what it consists of, and the functions that programs call. Those are defined, with their comments, in
// train_gpt2_sla.cu.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>
#include "activations.h"
#include "batch.h"
#include "kv_cache.h"
#include "llmc/operations.h"
#include "llmc/text/sampler.h"
#include "llmc/base/memory_plan.h"
#include "model_memory.h"
#include "orthogonalize.h"
#include "parameters.h"
#include "shape.h"
#include "sublayers.h"
#include "timeline.h"

struct PlanOptions {
  int B = 1, T = 1;  // what the activations have room for
  Recompute recompute = Recompute::nothing;
  bool keep_dead_kv = false;                  // project heads that no attention uses
  Shard shard = {};                           // this process's shard of the optimizer state
  int64_t logit_bytes = logit_chunk_bytes();  // bytes that a chunk of logits may take
  size_t sampling_bytes = 0;                  // bytes of the plan that draws samples
  // What Muon's iteration may take, in elements of floatX.
  int64_t muon_elements = muon_workspace_elements;
  double dropout = 0;  // --dropout
  bool muon = false;   // Muon updates the layers' matrices, and a shard has whole ones
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

// Generation with weights of its own, or with the weights of a model that was planned with `training`.
inline GenerationOptions generation_options(int slots, int64_t max_length, const PlanOptions& training = {}) {
  const int64_t rows = std::max<int64_t>(slots, std::min(max_length, prompt_rows));
  return {slots, max_length, rows, /*losses=*/false, training.keep_dead_kv, training.shard, training.logit_bytes};
}

struct UpdateOptions {
  double learning_rate, beta1, beta2, eps, weight_decay;
  double grad_clip;        // 0: none
  double momentum = 0.95;  // of Muon
};

struct GPT2 : ModelShape, ModelMemory {
  Params<floatX> params;
  Params<float> grads;
  DeviceArray<ParameterChunk> chunks;  // AdamW's, then the chunks of the matrices that Muon updates
  int64_t num_adamw_chunks = 0;
  DeviceArray<MuonMatrix> matrices;  // training->matrices

  ActivationArena activations;
  char* activation_memory = nullptr;
  Activations acts;
  MuonWorkspace muon;
  Sublayers sublayers;  // operations read weights through sublayer(i), norm(i), head(), embeddings()
  KVCache cache;        // used in generation alone
  MemoryPlan memory_plan;
  int64_t remembered = 0;  // positions of each stream that the layers remember, in training
  CudaGraph<int, int, int64_t, float> forward_backward;  // gpt2_forward_backward with B, T, remembered, dloss
  CudaGraph<> matrix_update;                             // gpt2_muon_update
  UpdateDraw draw;                                       // of the next gpt2_micro_step
  PinnedBuffer<StepStats> host_stats;                    // (1): where gpt2_read_stats copies acts.stats to
  double loss_scale = 1;                                 // in fp16: gpt2_set_loss_scale
  Collectives collectives;                               // of the ranks that train together
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
  const Head& head() { return await_bucket(sublayers.head.bucket), sublayers.head; }
  bool weights_are_arriving() const { return buckets_awaited == 0; }
  void await_all_weights() { await_bucket(int(parameters.buckets.size()) - 1); }

 private:
  void await_bucket(int bucket) {
    for (; int(buckets_awaited) <= bucket && buckets_awaited < parameters.buckets.size(); buckets_awaited++)
      collectives.await(buckets_awaited);
  }
};

// ----------------------------------------------------------------------------
// The model's memory

void gpt2_declare(GPT2& model, const ModelConfig& config, const PlanOptions& o);
void gpt2_declare_generation(GPT2& model, const ModelConfig& config, const GenerationOptions& o);
MemoryPlan gpt2_memory_plan(const ModelConfig& config, int B, PlanOptions o);
int64_t planned_logit_rows(const ModelConfig& config, int64_t rows, int64_t logit_bytes);
int most_sequences(const ModelConfig& config, int64_t T);
void gpt2_allocate(GPT2& model, const GPT2* weights_of = nullptr);
void gpt2_fill_activations(GPT2& model, int value);

// ----------------------------------------------------------------------------
// Training

void gpt2_set_loss_scale(GPT2& model, double scale);
void gpt2_zero_grad(GPT2& model);
void gpt2_forward_sublayer(GPT2& model, int i, const Batch& batch);
void gpt2_forward(GPT2& model, const Batch& batch);
void gpt2_backward(GPT2& model, const Batch& batch, bool sum_over_ranks = false);
void gpt2_forward_backward(GPT2& model, const Batch& batch, bool sum_over_ranks = false);
void gpt2_micro_step(GPT2& model, const int* inputs, const int* targets, int B, int T, int64_t num_micro_batches,
                     bool last = true);
void gpt2_set_flag(GPT2& model, double StepStats::*flag, bool is_set);
void gpt2_square_grads(GPT2& model);
void gpt2_update(GPT2& model, int64_t step, const UpdateOptions& o);
void gpt2_gather_masters(GPT2& model, float* host);

// ----------------------------------------------------------------------------
// Losses

void gpt2_zero_loss(GPT2& model);
void gpt2_forward(GPT2& model, const int* tokens, const Batch& batch);
void gpt2_forward_segments(GPT2& model, const int* tokens, int64_t B, int64_t T);
void gpt2_loss(GPT2& model, const int* targets, const Batch& batch, double divisor);
void gpt2_sum_losses_over_ranks(GPT2& model);
StepStats gpt2_read_stats(GPT2& model);

// ----------------------------------------------------------------------------
// Generation

void gpt2_extend(GPT2& model, const std::vector<int>& tokens, const std::vector<std::pair<int, int64_t>>& counts);
std::vector<float> gpt2_fetch_logits(GPT2& model, int64_t first_row, int64_t count);
std::vector<float> gpt2_read_prompt(GPT2& model, int slot, const std::vector<int>& prompt,
                                    std::vector<float>* ponder = nullptr);
std::vector<float> gpt2_generate(GPT2& model, std::vector<int>& tokens, int length, const SamplingOptions& options,
                                 uint64_t seed, int64_t step);
