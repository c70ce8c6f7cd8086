// What the program that samples is asked for, and what it writes.
#pragma once
#include <cstdint>                // int64_t, uint64_t
#include <optional>               // std::optional
#include <string>                 // std::string
#include <vector>                 // std::vector
#include "llmc/text/sampler.h"    // SamplingOptions
#include "llmc/text/tokenizer.h"  // Tokenizer

struct SampleOptions {
  std::string model;                        // a folder
  std::string prompt, prompt_file, batch;   // at most one of them
  bool interactive = false;
  int64_t tokens = 128;                     // to draw
  SamplingOptions sampling;
  int64_t seed = 1337;
  std::string stop;                         // text
  int slots = 8;                            // sequences at a time
  std::string tokenizer;
  bool no_end_of_text = false, ignore_end_of_text = false;
  bool quiet = false;
};

// Fills `options`. Returns false if the program has nothing else to do (--help was printed). Throws UserError.
bool parse_sample_options(int argc, char** argv, SampleOptions& options);

// The vocabulary that the options name, or the model's folder has; of 257 tokens without one, bytes. Throws UserError if there is none, or
// it has more tokens than the model.
Tokenizer sample_tokenizer(const SampleOptions& options, int vocab_size);

// A text to continue. The n-th token of the sequence is drawn with the n-th random number of the seed, whatever is sampled beside it.
struct SampleRequest {
  std::string prompt;
  std::vector<int> tokens;
  uint64_t seed;
};

// The tokens of a prompt, after an end of text, with which training documents begin. Throws UserError if they leave no room for another.
SampleRequest sample_request(const SampleOptions& options, const Tokenizer& tokenizer, const std::string& prompt, uint64_t seed,
                             int context_length);

// Those of --prompt, --prompt-file or --batch, whose lines have seeds of their own: --seed, --seed + 1, ...
std::vector<SampleRequest> sample_requests(const SampleOptions& options, const Tokenizer& tokenizer, int context_length);

// A line of JSON: a sample, why it ends, and how it began. Invalid UTF-8 becomes U+FFFD.
std::string sample_json(const SampleRequest& request, const std::string& text, int64_t tokens, const std::string& ended_by);
