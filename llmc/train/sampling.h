// What the program that samples is asked for, and what it writes.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>
#include "llmc/text/sampler.h"
#include "llmc/text/tokenizer.h"

inline constexpr const char* other_wiring_help = "read the model as this wiring; its weights must be enough for it";

struct SampleOptions {
  std::string model;                       // a folder
  std::optional<std::string> wiring;       // to read it as another one of the same weights
  std::string prompt, prompt_file, batch;  // at most one of them
  bool interactive = false;
  int64_t tokens = 128;  // to draw
  SamplingOptions sampling;
  int64_t seed = 1337;
  std::vector<std::string> stop;  // texts
  int slots = 8;                  // sequences at a time
  std::string tokenizer;
  bool no_end_of_text = false, ignore_end_of_text = false;
  bool quiet = false;
};

// Fills `options`. Returns false if the program has nothing else to do (--help was printed). Throws UserError.
bool parse_sample_options(int argc, char** argv, SampleOptions& options);

// Whether texts can be sampled together: with the same number of tokens, way of drawing and texts to end before.
bool same_sampling(const SampleOptions& a, const SampleOptions& b);

// Throws UserError, naming the option, for a number that is out of range.
void check_sampling(const SampleOptions& options);

// The vocabulary at path `named`, if that is not "", or of a model's folder: Tokenizer::of_model. Throws UserError if
// there is none.
Tokenizer model_tokenizer(const std::string& folder, const std::string& named, int vocab_size);

// A text to continue. The n-th token of the sequence is drawn with the n-th random number of the seed, whatever is
// sampled beside it.
struct SampleRequest {
  std::string prompt;
  std::vector<int> tokens;
  uint64_t seed;
};

// The tokens of a prompt, after an end of text, with which training documents begin. Throws UserError if they leave no
// room for another.
SampleRequest sample_request(const SampleOptions& options, const Tokenizer& tokenizer, const std::string& prompt,
                             uint64_t seed, int context_length);

// Appends to `text` what comes on standard input, as soon as something does. Returns false at its end, or when a signal
// asks to stop, which ends no system call.
bool read_stdin(std::string& text);

// The requests for --prompt, --prompt-file or --batch. Each line of a batch has a seed of its own: --seed, --seed + 1,
// ... None if a signal asks to stop before all of standard input has come.
std::vector<SampleRequest> sample_requests(const SampleOptions& options, const Tokenizer& tokenizer,
                                           int context_length);

// A line of JSON: a sample, why it ends, and how it began. Invalid UTF-8 becomes U+FFFD.
std::string sample_json(const SampleRequest& request, const std::string& text, int64_t tokens,
                        const std::string& ended_by);
