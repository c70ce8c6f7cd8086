// A training run of the model: what it asks for is planned and compared with what there is, then steps, validations,
// samples and checkpoints follow each other. What a run knows beside its model is in llmc/train/run.h.
#pragma once
#include <unistd.h>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>
#include "llmc/formats/checkpoint.h"
#include "llmc/formats/model_file.h"
#include "llmc/formats/config_json.h"
#include "llmc/model/flops.h"
#include "llmc/model/gpt2.h"
#include "llmc/model/limit.h"
#include "llmc/model/stream_memory.h"
#include "llmc/operations.h"
#include "llmc/train/run.h"
#include "llmc/train/stop_signal.h"
#include "llmc/text/scored_text.h"
#include "llmc/text/step_loader.h"
#include "llmc/text/validation_batches.h"
#include "llmc/base/clock.h"
#include "llmc/base/error.h"
#include "llmc/base/message.h"

#include "llmc/train/plan_run.h"

// ----------------------------------------------------------------------------
// Memory and weights

inline void allocate(Trainer& t) {
  const Run& run = t.run;
  gpt2_allocate(t.model);
  if (t.sampler) gpt2_allocate(*t.sampler, &t.model);
  if (run.train) t.step_tokens = PinnedBuffer<int>(token_buffer_bytes(run) / sizeof(int));
  const size_t copy_bytes = run.options.out.empty() ? 0 : checkpoint_copy_bytes(t.model, run.ranks.rank);
  if (copy_bytes > 0) t.checkpoint_copy = PinnedBuffer<float>(copy_bytes / sizeof(float));
}

// Weights, moments and progress: as a checkpoint left them, or a model's folder, or new ones.
inline void load_or_init_weights(Trainer& t, const std::optional<ModelConfig>& in_folder,
                                 const std::string& checkpoint) {
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

// ----------------------------------------------------------------------------
// Steps

// Begins to load this rank's tokens. Throws UserError on every rank if one of them cannot load the first step's.
inline void start_loading(Trainer& t) {
  Run& run = t.run;
  const int64_t n = run.grad_accum_steps * run.B * run.T;
  int* buffer = t.step_tokens.data;
  t.step_loader.emplace(*run.train, run.grad_accum_steps, run.B, run.ranks.rank, run.ranks.size,
                        std::array<StepTokens, 2>{{{buffer, buffer + n}, {buffer + 2 * n, buffer + 3 * n}}});
  t.model.collectives.together([&] {
    if (const std::string& error = t.step_loader->error(); !error.empty()) throw UserError(error);
  });
}

// This rank's tokens of the next step.
inline StepTokens next_tokens(Trainer& t) {
  Run& run = t.run;
  const WatchdogPause pause(run.watchdog);  // its disk may be slow
  return t.step_loader->next();
}

// The FLOPs of a token of the next micro-batch. With the term `memory` they depend on what there is of earlier
// segments.
inline double flops_of_next_segment(Trainer& t) {
  const int64_t segment = (t.model.remembered + t.run.T - 1) / t.run.T;
  if (std::exchange(t.counted_segment, segment) != segment)
    t.counted_flops =
        flops_per_token(t.model.config, t.model.attention_plan, t.run.T, segments_from(t, segment, segment + 1));
  return t.counted_flops;
}

// One update: grad_accum_steps micro-batches forward and backward, then AdamW. The host waits once, when all of it is
// queued. If the loss or the norm is not finite, the device has changed nothing. The step is skipped then: it counts
// for the data and the learning rate, which continue as if it had been a good one, but not as one of AdamW's updates,
// whose moments don't include it.
inline StepResult train_step(Trainer& t) {
  const double start = seconds_now();
  Run& run = t.run;
  GPT2& model = t.model;
  const TrainOptions& o = run.options;
  StepResult result = {};
  result.learning_rate = run.schedule(run.step + 1);
  if (run.loss_scale) {
    result.loss_scale = run.loss_scale->scale;
    if (double(result.loss_scale) != model.loss_scale) gpt2_set_loss_scale(model, double(result.loss_scale));
  }
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
    model.draw = {uint64_t(o.seed), run.step + 1, (i * run.ranks.size + run.ranks.rank) * run.B};
    gpt2_micro_step(model, tokens.inputs + first, tokens.targets + first, run.B, run.T, run.num_micro_batches(),
                    i + 1 == run.grad_accum_steps);
  }
  // Without the tokens of the next step all ranks stop after this one, as they do after a signal.
  const double queued = seconds_now();
  if (run.step + 1 < run.steps) {
    const WatchdogPause pause(run.watchdog);
    run.data_error = t.step_loader->error();
  }
  result.data_seconds += seconds_now() - queued;
  gpt2_set_flag(model, &StepStats::stop_requests, stop_signal() != 0 || !run.data_error.empty());
  gpt2_set_flag(model, &StepStats::unwritten_shards, is_writing_shard(run));
  gpt2_update(model, run.step + 1 - run.skipped_steps,
              {result.learning_rate, o.beta1, o.beta2, o.eps, o.weight_decay, o.grad_clip, o.momentum});
  const StepStats stats = gpt2_read_stats(model);
  model.timeline.end_step();
  const double rows = double(run.B) * run.T;
  result.loss = stats.mean(stats.loss, rows), result.ponder = stats.mean(stats.ponder, rows);
  result.scored_tokens = int64_t(stats.scored), result.grad_norm = stats.grad_norm();
  result.stop_requested = stats.stop_requests > 0, result.shards_are_written = stats.unwritten_shards == 0;
  result.skipped = !std::isfinite(stats.loss) || !std::isfinite(result.grad_norm);
  result.overflowed =
      run.loss_scale && run.loss_scale->explains(std::isfinite(stats.loss), std::isfinite(result.grad_norm));
  if (result.skipped) model.remembered = 0;  // what is not finite would stay in the segment memory
  count_step(run, result);
  UpdateCost cost = t.beside_model;
  cost.flops += rows * double(run.grad_accum_steps) * result.flops_per_token;
  result.limit_seconds = cost.seconds({run.gemm_peak, run.copy_bandwidth});
  result.seconds = seconds_now() - start;
  return result;
}

// The spans of the step before the last one: by now collectives are done that run beside the step after theirs.
inline void log_timeline(Trainer& t) {
  const Timeline& timeline = t.model.timeline;
  if (timeline.previous_step() < 0) return;
  for (const TimelineSpan& span : timeline.previous_spans())
    t.run.log.write({{"step", timeline.previous_step()},
                     {"span", std::string(span.what)},
                     {"of", t.model.parameters.buckets[span.bucket].name},
                     {"begin_ms", span.begin_ms},
                     {"end_ms", span.end_ms}});
}

// ----------------------------------------------------------------------------
// Beside the steps

// Waits until each rank has written its shard of the last checkpoint. Every rank calls it.
inline void finish_shards(Trainer& t) {
  Run& run = t.run;
  if (!run.shards_are_written) return;
  const WatchdogPause pause(run.watchdog);
  if (run.ranks.rank > 0) report_saved(run, /*wait=*/true);
  t.model.collectives.together([] {});
  count_shards_as_written(run);
}

// Waits for the last checkpoint, on every rank, before an error of all of them: the first rank that ends would have the
// launcher end rank 0, which may still be writing.
inline void finish_checkpoint(Trainer& t) {
  finish_shards(t);
  t.model.collectives.together([&] { report_saved(t.run, /*wait=*/true); });
}

// The mean loss over the scored tokens of ValidationBatches. It begins with an empty segment memory, and puts the
// training's aside. Returns false, on every rank, if one of them could not load its tokens: then it has no loss, and
// run.data_error of that rank says why.
inline bool validate_model(Trainer& t) {
  Run& run = t.run;
  GPT2& model = t.model;
  const double start = seconds_now();
  const ValidationBatches batches(*run.val, run.B, run.options.val_batches, run.ranks.rank, run.ranks.size);
  const double full_batch = double(run.B) * run.T;
  std::vector<int> inputs(size_t(run.B) * size_t(run.T)), targets(inputs.size());
  std::vector<float> losses;
  StepStats text = {};
  const std::vector<CheckpointTensor> of_training = fetch_memory(model.sublayers, run.B, model.remembered);
  model.remembered = 0;
  gpt2_zero_loss(model);
  try {
    for (int64_t i = 0; i < batches.count(); i++) {
      const auto [B, T] = [&] {
        const WatchdogPause pause_of_load(run.watchdog);
        return batches.load(i, inputs.data(), targets.data());
      }();
      gpt2_forward_segments(model, inputs.data(), B, T);
      gpt2_loss(model, targets.data(), {B, T}, full_batch);
      if (!run.tokenizer) continue;
      losses.resize(size_t(B * T));
      copy_to_host(losses.data(), model.acts.losses, losses.size() * sizeof(float));
      // Of scored targets (not below 0) that stand for text, as in evaluate_gpt2_sla.
      for (size_t i = 0; i < losses.size(); i++)
        if (const int64_t bytes = targets[i] < 0 ? 0 : bytes_of_token(*run.tokenizer, targets[i]); bytes > 0)
          text.text_nats += double(losses[i]), text.text_bytes += double(bytes);
    }
  } catch (const UserError& e) { run.data_error = e.what(); }
  model.remembered = store_memory(model.sublayers, of_training);
  copy_to_device(&model.acts.stats->text_nats, &text.text_nats, 2 * sizeof(double));
  gpt2_set_flag(model, &StepStats::stop_requests, !run.data_error.empty());
  gpt2_sum_losses_over_ranks(model);
  const StepStats stats = gpt2_read_stats(model);
  if (stats.stop_requests > 0) return false;
  const Validation v = {stats.mean(stats.loss, full_batch),
                        stats.mean(stats.ponder, full_batch),
                        int64_t(stats.scored),
                        int64_t(stats.tokens),
                        int64_t(stats.correct),
                        stats.text_nats,
                        stats.text_bytes,
                        seconds_now() - start};
  if (v.is_lost()) finish_checkpoint(t);
  const WatchdogPause pause(run.watchdog);
  report_validation(run, v);
  return true;
}

inline void sample(Trainer& t) {
  Run& run = t.run;
  const WatchdogPause pause(run.watchdog);
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
inline void save_checkpoint(Trainer& t) {
  const double start = seconds_now();
  finish_shards(t);
  report_saved(t.run, /*wait=*/true);
  GPT2& model = t.model;
  Collectives& collectives = model.collectives;
  std::vector<CheckpointTensor> segment_memory =
      gather_memory(collectives, fetch_memory(model.sublayers, t.run.B, model.remembered));
  if (t.checkpoint_copy.size == 0) return;
  const size_t state_size = model.state_bytes() / sizeof(float);
  float *m = t.checkpoint_copy.data, *v = m + state_size, *weights = v + state_size;
  gpt2_gather_masters(model, weights);
  fetch_shard(model, model.m_memory, m);
  fetch_shard(model, model.v_memory, v);
  uint32_t header = 0;
  std::string error;
  if (model.parameters.shard.count > 1) {
    try {
      const WatchdogPause pause(t.run.watchdog);  // for rank 0's disk the others wait
      if (t.run.ranks.rank == 0) header = lay_out_checkpoint(t.run.options.out, t.run.step, model.parameters);
    } catch (const UserError& e) { error = e.what(); }
    error = collectives.broadcast(error);
  }
  t.run.stall_seconds = seconds_now() - start;
  if (!error.empty()) return report_unsaved(t.run, error);
  std::vector<TextFile> files = model_text_files(model.config);
  for (TextFile& file : tokenizer_text_files(model.config, t.run.tokenizer_json)) files.push_back(std::move(file));
  const FetchTensor fetch = fetch_from(model, weights, /*is_on_host=*/true);
  start_checkpoint(t.run, model.parameters, {{}, std::move(files), fetch, m, v, std::move(segment_memory)}, header);
}

// ----------------------------------------------------------------------------
// The run

inline void train(Trainer& t) {
  Run& run = t.run;
  const TrainOptions& o = run.options;
  run.first_step = run.step;
  const auto validates = [&] { return run.val && due(run, o.val_every); };
  const auto samples = [&] { return t.sampler && due(run, o.sample_every); };
  // Before the first step; and after the one that the run resumes from, if an earlier process was stopped before that.
  if (validates() && !run.is_validated && !validate_model(t)) return;
  const bool is_sample_left = run.step > 0 && !run.is_sampled;
  if (samples() && (is_sample_left || run.step == run.steps)) sample(t);  // the latter: nothing to train is left
  if (run.step < run.steps) start_loading(t);
  for (bool stopping = run.ranks.size == 1 && stop_signal() != 0; run.step < run.steps && !stopping;) {
    run.watchdog.step = run.step + 1;
    const StepResult result = train_step(t);
    {
      const WatchdogPause pause(run.watchdog);  // so may be the disk of the log
      report_step(run, result);
      log_timeline(t);
    }
    if (result.shards_are_written) count_shards_as_written(run);
    if (gives_up(run)) finish_checkpoint(t);
    check_progress(run, result);
    stopping = must_stop(run, result);
    run.is_cut_short = stopping && (validates() || samples());
    if (validates() && !stopping) stopping = !validate_model(t);
    if (samples() && !stopping) sample(t);
    stopping = stopping || must_stop(run, result);
    if (checkpoint_due(run, result, stopping)) save_checkpoint(t);
    report_saved(run, /*wait=*/false);
  }
  // The last step's weights are awaited by no forward pass.
  t.model.timeline.start_step(run.step + 1);
  t.model.collectives.wait();
  log_timeline(t);
}

inline void finalize(Trainer& t) {
  t.model.collectives.finalize();
  t.run.watchdog.stop();
  finalize_ranks(t.run.ranks);
}

inline int run_trainer(int argc, char** argv, Trainer& t) {
  Run& run = t.run;
  const TrainOptions& o = run.options;
  Collectives& collectives = t.model.collectives;
  if (!parse_options(argc, argv, run.options)) return 0;
  handle_stop_signals();  // before MPI and others have threads, which would be given the signals
  run.ranks = init_ranks(o.rendezvous, o.out);
  const FileDescriptor json_output(o.json && run.ranks.rank == 0 ? dup(STDOUT_FILENO) : -1);
  if ((run.ranks.rank > 0 || o.json) && freopen("/dev/null", "w", stdout) == nullptr)
    user_error("cannot open /dev/null");                      // only rank 0 prints
  collectives.init(run.ranks, run.watchdog, o.hang_timeout);  // selects the GPU
  collectives.all_equal("the ranks' options or programs", [&] { return describe_start(run); });
  std::string checkpoint;
  std::optional<ModelConfig> in_folder;
  collectives.together([&] {
    if (run.ranks.rank == 0) checkpoint = checkpoint_to_resume(run);
  });
  checkpoint = collectives.broadcast(checkpoint);
  if (!checkpoint.empty())
    collectives.all_equal("the checkpoint's checksums", [&] { return checkpoint_checksum(checkpoint); });
  collectives.together([&] { check_and_plan(t, checkpoint, in_folder); });  // no rank writes before all have looked
  if (o.dry_run) {
    LogFields numbers = describe(t);
    numbers.insert(numbers.end(), t.planned.begin(), t.planned.end());
    if (json_output.fd >= 0) {  // run_program sees whether it can be written
      fflush(stdout), dup2(json_output.fd, fileno(stdout));
      printf("%s\n", json_text(numbers).c_str());
    }
    return finalize(t), 0;
  }
  if (run.ranks.rank == 0) {  // before the plan is allocated: these matrices take 400 MB on a large GPU
    const Ceilings ceilings = measure_ceilings(t.model, 0.1);
    run.gemm_peak = ceilings.gemm, run.copy_bandwidth = ceilings.copy;
  }
  t.beside_model = cost_beside_model(t.model, run.grad_accum_steps);
  collectives.together([&] {
    allocate(t);
    load_or_init_weights(t, in_folder, checkpoint);
  });
  collectives.all_equal("the ranks' data", [&] { return describe_data(run); });
  stop_after_steps();
  collectives.together([&] { open_output(run, checkpoint, describe(t)); });
  collectives.broadcast(&run.is_validated, sizeof run.is_validated);
  print_start(run, checkpoint, matmul_precision());

  const double start = seconds_now();
  try {
    train(t);
    finish_shards(t);
  } catch (const std::exception&) {
    try {
      finish_output(run);
    } catch (const std::exception& e) {
      print_error(e.what());  // the first error is the one that the run ends with
    }
    throw;
  }
  finish_output(run);
  collectives.together([&] { check_data_error(run); });
  finalize(t);
  return finish_run(run, seconds_now() - start);
}
