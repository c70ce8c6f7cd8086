// The trainer's options. A new one is a member of TrainOptions and an entry of train_options, in options.cpp.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include "model_options.h"

struct OptionTable;  // option.h

struct TrainOptions {
  // data
  std::string train_data, val_data;
  bool shuffle = false;
  std::string tokenizer;
  // model
  ModelOptions model;
  bool keep_dead_kv = false;
  // batch
  int micro_batch = 4;
  std::optional<int> seq_len;          // none: plan_batches sets it,
  std::optional<int64_t> total_batch;  //   and this
  int recompute = 0;
  bool tf32 = false;
  double dropout = 0;
  // optimisation
  std::optional<int64_t> steps;  // none: open_data sets it
  std::string schedule = "cosine";
  double learning_rate = 3e-4, final_fraction = 0.0, weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  std::string optimizer = "adamw";  // or "muon"
  double momentum = 0.95;
  double grad_clip = 1.0;
  int64_t warmup_steps = 0, max_bad_steps = 10;
  int64_t seed = 1337;
  // ranks
  std::string rendezvous;
  int zero = 1;
  double hang_timeout = 180;  // seconds
  // what is written, and when
  std::string out;
  int64_t val_every = 250, val_batches = 20, sample_every = 0, sample_length = 64, checkpoint_every = 0;
  double temperature = 1;
  std::string prompt;
  bool resume = false, same_options = false, reset_memory = false;
  std::string resume_from;
  int64_t keep = 0, keep_every = 0;
  bool stop_on_save_error = false;
  std::string log_level = "info";

  bool dry_run = false, json = false;

  std::string config;   // the file that --config names
  std::string as_toml;  // these options as --config reads them, without the options of this process alone
};

// The options whose values are the members of `options`.
OptionTable train_options(TrainOptions& options);

// Fills `options`. Returns false if the program has nothing else to do (--help was printed). Throws UserError for
// anything that is not a valid command line; whatever can be judged without looking at files is judged here.
bool parse_options(int argc, char** argv, TrainOptions& options);
