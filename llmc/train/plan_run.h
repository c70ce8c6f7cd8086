// What a training run needs before anything is written: the model that the options describe, what memory it takes and
// whether that is free, and all that can be wrong.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>
#include "llmc/formats/checkpoint.h"
#include "llmc/model/change_wiring.h"
#include "llmc/formats/config_json.h"
#include "llmc/model/flops.h"
#include "llmc/model/gpt2.h"
#include "llmc/model/limit.h"
#include "llmc/model/print_model.h"
#include "llmc/model/stream_memory.h"
#include "llmc/operations.h"
#include "llmc/ops/precision.h"
#include "llmc/train/largest_micro_batch.h"
#include "llmc/train/model_options.h"
#include "llmc/train/print.h"
#include "llmc/train/run.h"
#include "llmc/text/document_lengths.h"
#include "llmc/text/step_loader.h"
#include "llmc/base/crc32c.h"
#include "llmc/base/error.h"
#include "llmc/base/meminfo.h"
#include "llmc/base/message.h"

// A run of this model. What is declared later is destroyed first, while what it uses still exists.
struct Trainer {
  GPT2 model;
  std::optional<GPT2> sampler;    // on rank 0, if samples are asked for: the same weights, planned for generation
  PinnedBuffer<int> step_tokens;  // (2, 2, grad_accum_steps, B, T): inputs and targets of this step and the next
  // m and v (state), and on rank 0 the weights (parameters), which the writer reads while it writes a checkpoint.
  PinnedBuffer<float> checkpoint_copy;
  Run run;
  std::optional<StepLoader> step_loader;     // from the first step on
  std::optional<DocumentLengths> documents;  // of the training data, with the term `documents`
  int64_t counted_segment = -1;              // of the micro-batch before, and its FLOPs per token
  double counted_flops = 0;
  UpdateCost beside_model = {};  // of an update
  LogFields planned;             // the numbers of the memory plan
};

// The bytes that save_checkpoint copies to host memory for the writer: m and v on each rank that has a shard of them,
// or on rank 0, which also has all weights.
inline size_t checkpoint_copy_bytes(const GPT2& model, int rank) {
  if (rank > 0 && model.parameters.shard.count == 1) return 0;
  return (rank == 0 ? model.parameters.layout.bytes : 0) + 2 * model.state_bytes();
}

// The host memory for the tokens of two updates, inputs and targets: one update's are loaded while the other computes.
inline size_t token_buffer_bytes(const Run& run) {
  return 4 * sizeof(int) * size_t(run.grad_accum_steps) * size_t(run.B) * size_t(run.T);
}

// What will be allocated in host memory. `segments` is for validations, which put the segment memory aside, and for
// checkpoints, into which rank 0 writes all ranks' segment memory.
struct HostMemory {
  size_t tokens = 0, checkpoints = 0, segments = 0;  // bytes
  size_t total() const { return tokens + checkpoints + segments; }
  struct Part {
    const char *name, *name_beside_gpu;  // the latter in the log, where the memory of a GPU stands beside it
    size_t bytes;
  };
  std::vector<Part> parts() const {
    return {{"tokens of two updates", "tokens of two updates, of host memory", tokens},
            {"copy for checkpoints", "copy for checkpoints, of host memory", checkpoints},
            {"copies of segment memory", "copies of segment memory, of host memory", segments}};
  }
};
inline HostMemory plan_host_memory(const Trainer& t) {
  const Run& run = t.run;
  const bool validates = run.val && run.options.val_every > 0, writes = !run.options.out.empty();
  HostMemory host = {run.train ? token_buffer_bytes(run) : 0,
                     writes ? checkpoint_copy_bytes(t.model, run.ranks.rank) : 0};
  const size_t copies = size_t(validates) + size_t(writes) * size_t(run.ranks.rank == 0 ? run.ranks.size : 1);
  for_each_memory(t.model.sublayers, [&](int, const SegmentMemory& memory) {
    host.segments += copies * size_t(run.B) * size_t(memory.M) * size_t(memory.C) * sizeof(float);
  });
  return host;
}

// The log's description of the run.
inline LogFields describe(const Trainer& t) {
  LogFields fields;
  visit_fields(t.model.config, [&](const ConfigField& field, const auto& value) {
    fields.push_back({field.name, value});
  });
  fields.push_back({"wiring", t.model.config.wiring.text});
  fields.push_back({"num_parameters", t.model.parameters.num_parameters});
  for (LogField& field : describe_run(t.run)) fields.push_back(std::move(field));
  if (t.documents) {
    fields.push_back({"documents", t.documents->count});
    fields.push_back({"mean_document_tokens", t.documents->mean});
    fields.push_back({"median_document_tokens", t.documents->median});
  }
  fields.push_back({"precision", std::string(precision_name)});
  fields.push_back({"device", std::string(device_name())});
  fields.push_back({"kv_bytes_per_token", kv_bytes_per_token(t.model.config, t.model.attention_plan, sizeof(floatX))});
  LogFields memory;
  for (int group = 0; group < int(MemoryGroup::count); group++)
    if (const size_t bytes = t.model.memory_plan.bytes[group]; bytes > 0)
      memory.push_back({group_name(MemoryGroup(group)), int64_t(bytes)});
  for (const HostMemory::Part& part : plan_host_memory(t).parts())
    if (part.bytes > 0)
      memory.push_back({device_memory_is_host_memory ? part.name : part.name_beside_gpu, int64_t(part.bytes)});
  fields.push_back({"memory", memory});
  return fields;
}

// Prints the memory plan, and returns its numbers. Throws UserError if it does not fit into what is free.
inline LogFields print_memory(const GPT2& model, const PlanOptions& o, const HostMemory& host) {
  const MemoryPlan& plan = model.memory_plan;
  const TrainingShape& shape = *model.training;
  const int ranks = model.collectives.size();
  // The workspaces have been allocated already.
  const size_t available = device_memory_available() + device_workspace_bytes(), reserve = device_reserve_bytes(),
               beside = reserve + (device_memory_is_host_memory ? host.total() : 0), total = plan.total() + beside;
  auto line = [](const char* what, size_t bytes) { printf("  %-26s %10s", what, bytes_text(double(bytes)).c_str()); };
  printf("memory plan for B %d, T %d, recompute level %d%s:\n", shape.B, shape.T, int(shape.recompute),
         ranks > 1 ? format(", on each of %d ranks", ranks).c_str() : "");
  for (int group = 0; group < int(MemoryGroup::count); group++)
    if (plan.bytes[group] > 0) line(group_name(MemoryGroup(group)), plan.bytes[group]), printf("\n");
  for (const HostMemory::Part& part : host.parts())
    if (part.bytes > 0) {
      line(part.name, part.bytes);
      printf("%s\n", device_memory_is_host_memory ? "" : " of host memory, beside the total");
    }
  if (reserve > 0) line("CUDA, its graphs and NCCL", reserve), printf(" to be kept free\n");
  line("total", total);
  printf(" of %s free on the %s\n", bytes_text(double(available)).c_str(), device_name());
  const size_t of_sequences = model.activations.layout.bytes - plan[MemoryGroup::logits] - plan[MemoryGroup::muon];
  const int most = largest_micro_batch(available - std::min(available, beside), model.config, o);
  printf("  each sequence takes %s beside the logits; the largest micro-batch that fits is %d\n",
         bytes_text(double(of_sequences) / shape.B).c_str(), most);
  const std::string of_batch =
      std::string("-b or -t") + (shape.recompute < Recompute::chunks ? ", or recompute more (-r 4)" : "");
  auto check = [&](const char* memory, size_t needed, size_t free, const std::string& other_advice) {
    if (needed <= free) return;
    user_error("the plan exceeds the free %smemory by %s; take a smaller %s", memory, bytes_text(double(needed - free)),
               host.tokens > needed - free ? "-d" : other_advice);
  };
  const bool is_model_too_large = plan.total() - model.activations.layout.bytes > available;
  check("", total, available, is_model_too_large ? what_takes_most(model.config) : of_batch);
  if (!device_memory_is_host_memory)
    check("host ", host.total(), host_memory_available(), what_takes_most(model.config));
  return {{"memory_needed", int64_t(total)},
          {"memory_free", int64_t(available)},
          {"largest_micro_batch", int64_t(most)}};
}

// From here on the dropout of the model's config.json is the run's. Prints the dropout that `folder` was trained with,
// if it had any and another, unless `folder` is "".
inline void take_dropout(const Run& run, const std::string& folder, ModelConfig& config) {
  const double now = run.options.dropout;
  std::string before;
  visit_dropout(config, [&](const char* key, double& p) {
    if (p != now && p > 0) before += format("%s%s %g", before.empty() ? "" : ", ", key, p);
    p = now;
  });
  if (!folder.empty() && !before.empty() && run.ranks.rank == 0)
    printf("%s was trained with %s; this run has --dropout %g\n", folder.c_str(), before.c_str(), now);
}

// The model that the options describe, or, where -e names none, the checkpoint's. `in_folder`: the model in the folder
// that -e names.
inline ModelConfig choose_model(Run& run, const std::string& checkpoint, std::optional<ModelConfig>& in_folder) {
  const TrainOptions& o = run.options;
  ModelOptions model = o.model;
  if (ModelConfig preset; !checkpoint.empty() && !config_from_preset(model.model, preset) && !is_folder(model.model)) {
    // The checkpoint has all of the model.
    warn(run, "-e %s: is not there; the model is %s's", model.model, checkpoint);
    model.model = checkpoint;
  }
  ModelConfig config = model_config(model, in_folder);
  if (!checkpoint.empty()) check_resumed_model(checkpoint, config);
  if (in_folder && !o.out.empty() && run.ranks.rank == 0) {
    try {
      run.model_checksum = crc32c_hex(weights_checksum(o.model.model));
    } catch (const UserError&) {  // they are not there any more
      if (checkpoint.empty()) throw;
    }
  }
  take_dropout(run, in_folder && checkpoint.empty() ? model.model : "", config);
  return config;
}

// The model's special tokens and the one at which documents begin: its own or, where it has none or the vocabulary is
// new to the model of `folder`, the vocabulary's end of text.
inline void take_vocabulary(const Run& run, const std::string& folder, ModelConfig& config) {
  const std::vector<int> own = config.special.eos;
  const int end = run.tokenizer ? run.tokenizer->end_of_text() : own.empty() ? -1 : own[0];
  const bool is_new = run.tokenizer && run.tokenizer->is_new_to(folder);
  if (run.tokenizer)
    if (const std::string said = take_end_of_text(config, end, is_new); !said.empty() && run.ranks.rank == 0)
      printf("%s: %s\n", folder.c_str(), said.c_str());
  if (config.end_of_text < 0 || is_new) config.end_of_text = end;
}

// With `documents`: how long the documents of the training data are. Throws UserError if the token that begins one is
// not known, or does not occur.
inline void find_documents(Trainer& t, const ModelConfig& config) {
  const Run& run = t.run;
  const std::string& wiring = config.wiring.given;
  if (config.end_of_text < 0 && (run.train || run.val))
    user_error("wiring \"%s\": documents begin at the vocabulary's end of text, and beside the data there is no "
               "vocabulary; name it (--tokenizer)",
               wiring);
  if (!run.train) return;
  t.documents = document_lengths(run.train->shards, config.end_of_text, run.T);
  if (t.documents->ends_of_text == 0 && run.tokenizer && run.tokenizer->end_of_text() != config.end_of_text)
    user_error("wiring \"%s\": documents begin at token %d by the model's config.json (document_token_id, or "
               "eos_token_id), and %s has none: the vocabulary's end of text is %d; take data like what the model was "
               "trained on, or write \"document_token_id\": %d there",
               wiring, config.end_of_text, run.options.train_data, run.tokenizer->end_of_text(),
               run.tokenizer->end_of_text());
  if (t.documents->ends_of_text == 0)
    user_error("wiring \"%s\": documents begin at token %d, the end of text, and %s has none; make it with "
               "data/tokenize --end-of-text before, or leave documents out",
               wiring, config.end_of_text, run.options.train_data);
}

// How a sequence of the run attends, from the segment `first` of a stream to before `end`.
inline Segments segments_from(const Trainer& t, int64_t first, int64_t end) {
  return {first, end, t.documents ? &t.documents->places : nullptr};
}

inline void print_documents(const Trainer& t) {
  const double flops = t.run.flops_per_token,
               in_rows = flops_per_token(t.model.config, t.model.attention_plan, t.run.T);
  printf("documents: %lld in the training data, of %.0f tokens in the mean and %lld in the median; a token takes %.4g "
         "GFLOP, %.1f %% of what it does where a row is one\n",
         (long long)t.documents->count, t.documents->mean, (long long)t.documents->median, flops * 1e-9,
         100 * flops / in_rows);
  if (wgmma_is_asked_for())
    warn(t.run, "SLA_ATTENTION=wgmma: attention within documents has no kernels by wgmma; it has those by mma.sync");
}

// Declares the model, and the sampler, if there is one. Returns what the model was declared with.
inline PlanOptions declare_models(Trainer& t, const ModelConfig& config) {
  const Run& run = t.run;
  const TrainOptions& o = run.options;
  PlanOptions plan = {run.B, run.T, Recompute(o.recompute), o.keep_dead_kv};  // asks the GPU for its memory
  plan.muon = o.optimizer == "muon", plan.dropout = o.dropout;
  if (o.zero == 1) plan.shard = {run.ranks.rank, run.ranks.size, /*whole_matrices=*/plan.muon};
  const double state_of_each = (has_master_weights ? 3.0 : 2.0) * sizeof(float) / plan.shard.count;  // masters, m and v
  check_parameters_fit(config, sizeof(floatX) + sizeof(float) + state_of_each, "weights, gradients and moments",
                       device_memory_available() + device_workspace_bytes(), device_name());
  if (o.sample_every > 0 && run.ranks.rank == 0) {  // all ranks have the same weights
    gpt2_declare_generation(t.sampler.emplace(), config, generation_options(1, o.sample_length, plan));
    plan.sampling_bytes =
        t.sampler->memory_plan.total() - t.sampler->memory_plan[MemoryGroup::weights] - device_workspace_bytes();
  }
  gpt2_declare(t.model, config, plan);
  return plan;
}

// The settings that must be the same on all ranks, a line each.
inline std::string describe_start(const Run& run) {
  const std::string program = read_whole_file("/proc/self/exe", most_text_bytes);
  return run.options.as_toml + format("precision = %s\nprogram = %s, by its CRC-32C", precision_name,
                                      crc32c_hex(crc32c(program.data(), program.size())).c_str());
}

// Everything that can be wrong is found here, before anything is written. `checkpoint`: to resume from, or "";
// `in_folder`: the model in the folder that -e names.
inline void check_and_plan(Trainer& t, const std::string& checkpoint, std::optional<ModelConfig>& in_folder) {
  Run& run = t.run;
  const TrainOptions& o = run.options;
  ModelConfig config = choose_model(run, checkpoint, in_folder);
  plan_batches(run, config.max_seq_len, in_folder.has_value(), config.whole_model().memory > 0);
  const std::string folder = !checkpoint.empty() ? checkpoint : in_folder ? o.model.model : "";
  open_data(run, folder, config.vocab_size);
  take_vocabulary(run, folder, config);
  if (config.whole_model().documents) find_documents(t, config);
  const PlanOptions plan = declare_models(t, config);
  if (o.tf32) gemm_allow_tf32();
  if (is_fp16) run.loss_scale.emplace();
  t.model.timeline.on = o.log_level == "debug";
  // Without data, as print_model has it.
  const Segments segments = run.train ? segments_from(t, 0, segments_of_stream(run)) : Segments();
  run.flops_per_token = flops_per_token(config, t.model.attention_plan, run.T, segments);
  print_model(t.model, run.T, t.model.parameters);
  if (t.documents) print_documents(t);
  if (o.dropout > 0 && wgmma_is_asked_for())
    warn(run, "SLA_ATTENTION=wgmma: attention with dropout has no kernels by wgmma; it has those by mma.sync");
  if (o.dropout > 0)
    printf("dropout: %g of the embeddings, attention's probabilities and the branches' outputs, in training alone\n",
           o.dropout);
  if (checkpoint.empty() && in_folder && !same_model(*in_folder, config))
    printf("%s was trained with the wiring %s and continues with %s; what changes:\n%s", o.model.model.c_str(),
           in_folder->wiring.text.c_str(), config.wiring.text.c_str(),
           describe(plan_wiring_change(*in_folder, t.model.attention_plan)).c_str());
  t.planned = print_memory(t.model, plan, plan_host_memory(t));
  resume_progress(run, checkpoint, describe(t));
}
