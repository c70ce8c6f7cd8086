// Evaluates a trained model: how likely texts are to it, by position too; which of several answers; the last word of
// texts; and requests of another program. All of it is the loss of the last tokens of sequences, which are computed
// several at a time by the model of train_gpt2_sla.cu, planned for generation: with different lengths, without padding,
// and long ones in parts, through the K/V cache.
#define SLA_NO_MAIN
#include "train_gpt2_sla.cu"
#include <iostream>
#include <numeric>
#include <set>
#include "llmc/sampling_engine.h"
#include "llmc/train/evaluation.h"
#include "llmc/text/choice_file.h"
#include "llmc/text/dataloader.h"
#include "llmc/text/scored_text.h"
#include "llmc/base/foreign_file.h"
#include "llmc/base/message.h"

// ----------------------------------------------------------------------------
// Scoring

// Generation with the losses of all tokens, of several sequences in a pass.
GenerationOptions scoring_plan(int slots, int64_t max_length) {
  GenerationOptions o = generation_options(slots, max_length);
  o.rows = std::max<int64_t>(slots, std::min(slots * max_length, scoring_rows));
  o.losses = true;
  return o;
}

// A sequence that is being scored.
struct Scoring {
  ScoredSequence sequence;
  int slot;                        // in the K/V cache
  int64_t read = 0;                // inputs that have been computed
  std::vector<float> losses = {};  // of the scored tokens so far, in nats
  std::vector<float> ponder = {};  // with `act` how many cycles the tokens before them ran
  // Whether each scored token so far is the likeliest one: the token with the highest logit, and the first among equal
  // ones.
  std::vector<uint8_t> likeliest = {};

  bool is_done() const { return read == sequence.inputs(); }
  double nats() const { return std::accumulate(losses.begin(), losses.end(), 0.0); }
  bool all_likeliest() const { return std::count(likeliest.begin(), likeliest.end(), 0) == 0; }
};

// Some of the next inputs of several sequences, a row each, and the losses of their targets.
struct ScoringPass {
  struct Part {
    Scoring* scoring;
    int64_t row, count, first_scored;  // first_scored: the first of `count` rows whose target is scored, or `count`
  };
  std::vector<int> tokens, targets;  // (rows)
  std::vector<Part> parts;

  int64_t rows() const { return int64_t(tokens.size()); }

  void add(Scoring& s, int64_t most_rows) {
    const std::vector<int>& all = s.sequence.tokens;
    const int64_t count = std::min(most_rows, s.sequence.inputs() - s.read);
    const int64_t first_target = s.sequence.inputs() + 1 - s.sequence.scored;
    parts.push_back({&s, rows(), count, std::min(count, std::max<int64_t>(0, first_target - (s.read + 1)))});
    tokens.insert(tokens.end(), all.begin() + s.read, all.begin() + s.read + count);
    targets.insert(targets.end(), all.begin() + s.read + 1, all.begin() + s.read + 1 + count);
    s.read += count;
  }

  // Computes the rows. Throws UserError for a loss that is not finite.
  void run(GPT2& model) const {
    std::vector<std::pair<int, int64_t>> counts;
    for (const Part& part : parts) counts.push_back({part.scoring->slot, part.count});
    gpt2_extend(model, tokens, counts);
    gpt2_loss(model, targets.data(), {1, rows()}, /*divisor=*/1);
    std::vector<float> losses(tokens.size());
    copy_to_host(losses.data(), model.acts.losses, losses.size() * sizeof(float));
    std::vector<uint8_t> correct(tokens.size());
    copy_to_host(correct.data(), model.acts.correct, correct.size());
    std::vector<float> ponder;
    append_ponder(ponder, model.sublayers, rows());
    for (const Part& part : parts) {
      Scoring& s = *part.scoring;
      const int64_t begin = part.row + part.first_scored, end = part.row + part.count;
      for (int64_t row = begin; row < end; row++)
        if (!std::isfinite(losses[row]))
          user_error("the loss of a token is not finite: the model's weights, or what it computes from them, have "
                     "become NaN or infinite: take an earlier checkpoint");
      s.losses.insert(s.losses.end(), losses.begin() + begin, losses.begin() + end);
      if (!ponder.empty()) s.ponder.insert(s.ponder.end(), ponder.begin() + begin, ponder.begin() + end);
      s.likeliest.insert(s.likeliest.end(), correct.begin() + begin, correct.begin() + end);
    }
  }
};

// Scores sequences 0 ... count - 1, which make(i) returns, as many at a time as fit, and calls finished(i, scoring) of
// each, in their order. Their lengths must fit into the cache.
template <class Make, class Finished>
void score_sequences(GPT2& model, int64_t count, Make make, Finished finished) {
  // In a pass all sequences but the last are computed to their ends. So the open ones are consecutive, and no slot is
  // taken twice.
  std::deque<Scoring> open;
  for (int64_t next = 0, done = 0; done < count;) {
    ScoringPass pass;
    for (size_t i = 0; i < size_t(model.cache.plan.slots) && pass.rows() < model.rows; i++) {
      if (i == open.size()) {
        if (next == count) break;
        open.push_back({make(next), int(next % model.cache.plan.slots)});
        const ScoredSequence& sequence = open.back().sequence;
        CHECK(1 <= sequence.scored && sequence.scored <= sequence.inputs());
        model.cache.clear(open.back().slot);
        next++;
      }
      pass.add(open[i], model.rows - pass.rows());
    }
    pass.run(model);
    for (; !open.empty() && open.front().is_done(); open.pop_front()) finished(done++, open.front());
  }
}

// ----------------------------------------------------------------------------
// What is evaluated

// The tokens of a file, which has them or has a text.
struct TextToScore {
  std::string path;
  std::optional<TokenFile> file;
  std::vector<uint16_t> encoded;

  int64_t count() const { return file ? file->num_tokens : int64_t(encoded.size()); }
  ScoredSequence sequence(const TextWindows::Window& window) const {
    if (!file) return sequence_of(window, encoded.data());
    const std::vector<uint16_t> tokens = file->read(window.begin, window.end - window.begin);
    return sequence_of({0, window.end - window.begin, window.first - window.begin}, tokens.data());
  }
  // (last - first): 1 for each of these tokens that is scored, 0 for others.
  std::vector<uint8_t> scored(int64_t first, int64_t last) const {
    return file ? file->mask.scored(first, last - first) : std::vector<uint8_t>(size_t(last - first), 1);
  }
};

struct ChoicesToScore {
  std::string path;
  std::vector<ChoiceQuestion> questions;
  std::vector<std::pair<size_t, size_t>> answers;  // (question, answer)

  ScoredSequence sequence(size_t i) const {
    const auto [question, answer] = answers[i];
    const ChoiceQuestion& q = questions[question];
    ScoredSequence s = {{q.context.begin(), q.context.end()}, int64_t(q.answers[answer].size())};
    s.tokens.insert(s.tokens.end(), q.answers[answer].begin(), q.answers[answer].end());
    return s;
  }
};

struct LastWordsToScore {
  std::string path;
  std::vector<ScoredSequence> texts;
};

struct Evaluator {
  const EvaluateOptions& options;
  GPT2 model;
  std::optional<Tokenizer> tokenizer;  // none where nothing needs it and none is known
  EvaluationResults results;
  std::vector<TextToScore> texts;
  std::vector<ChoicesToScore> choices;
  std::vector<LastWordsToScore> last_words;
  int64_t longest = 1;  // inputs of a sequence
  int64_t tokens_read = 0;
  double start = seconds_now(), shown = start;  // when the progress was last printed

  explicit Evaluator(const EvaluateOptions& o)
      : options(o), results{o.model, "", 0, 0, {}, {}, {}, PositionLosses(0)} {}

  // Counts a sequence for the progress and the speed.
  void count(const Scoring& s) {
    tokens_read += s.sequence.inputs();
    if (options.quiet || !isatty(STDERR_FILENO) || seconds_now() < shown + 1) return;
    shown = seconds_now();
    fprintf(stderr, "\r%lld tokens read, %.0f tokens/s", (long long)tokens_read, double(tokens_read) / (shown - start));
  }
  void end_progress() const {
    if (shown > start) fputs("\r\033[K", stderr);
  }
};

// A mask counts as one: TokenFile's error says what it is.
bool is_token_file(const std::string& path) {
  const std::string end = path.substr(path.size() - std::min<size_t>(path.size(), 4));
  const int32_t magic = magic_number_of(path);
  return magic == shard_magic || magic == mask_magic || end == ".bin" || end == ".npy";
}

// The vocabulary, if one is known: the model's, with which those beside files of tokens must agree.
void choose_tokenizer(Evaluator& e, int vocab_size) {
  const EvaluateOptions& o = e.options;
  std::vector<std::string> folders = {o.model};
  for (const std::string& path : o.files)
    if (is_token_file(path) || magic_number_of(path) == choice_file_magic) folders.push_back(parent_folder(path));
  e.tokenizer = Tokenizer::of_model(o.tokenizer, folders, vocab_size);
}

// Throws UserError if no vocabulary is known.
void need_tokenizer(const Evaluator& e, int vocab_size) {
  const EvaluateOptions& o = e.options;
  if (o.tokenizer == "none") user_error("--tokenizer none: without a vocabulary only files of tokens can be evaluated");
  if (!e.tokenizer) model_tokenizer(o.model, o.tokenizer, vocab_size);  // which says so
}

// Reads a file and checks it. Throws UserError.
void add_file(Evaluator& e, const std::string& path, const ModelConfig& config) {
  if (magic_number_of(path) == choice_file_magic) {
    ChoicesToScore choices = {path, read_choice_file(path, config.vocab_size), {}};
    for (size_t question = 0; question < choices.questions.size(); question++)
      for (size_t answer = 0; answer < choices.questions[question].answers.size(); answer++)
        choices.answers.push_back({question, answer});
    e.choices.push_back(std::move(choices));
    return;
  }
  TextToScore text = {path, {}, {}};
  if (is_token_file(path)) {
    text.file.emplace(path, config.vocab_size);
  } else {
    need_tokenizer(e, config.vocab_size);
    const std::string bytes = read_whole_file(path, most_text_bytes);
    const std::string why = foreign_format(bytes);
    if (!why.empty()) user_error("%s: %s", path, why);
    if (is_binary(bytes) || bytes.find('\0') != std::string::npos)
      user_error("%s: is no text: it has bytes of zero or many control characters; the name of a file of headerless "
                 "tokens ends in .bin",
                 path);
    text.encoded = encode_document(*e.tokenizer, bytes);
  }
  if (text.count() < 2)
    user_error(text.file ? "%s: has one token, and there is none before it that could predict it"
                         : "%s: is empty: there is nothing to predict",
               path);
  if (text.file && text.file->num_scored() == 0)
    user_error("%s: the mask beside it leaves no token to score; remove it to score every token", path);
  e.texts.push_back(std::move(text));
}

// The windows of a text that are scored: all of them, or as many as the options say, at even distances.
struct ChosenWindows {
  TextWindows all;
  int64_t count;

  TextWindows::Window operator[](int64_t i) const { return all[i * all.count() / count]; }
};

ChosenWindows chosen_windows(const Evaluator& e, const TextToScore& text) {
  const TextWindows all = {text.count(), e.results.context, e.results.stride};
  return {all, e.options.windows > 0 ? std::min(e.options.windows, all.count()) : all.count()};
}

// Throws UserError unless a token is scored in the text's windows: nothing has no mean.
void check_scored(const Evaluator& e, const TextToScore& text) {
  const ChosenWindows windows = chosen_windows(e, text);
  for (int64_t i = 0; i < windows.count; i++)
    for (uint8_t is_scored : text.scored(windows[i].first, windows[i].end))
      if (is_scored) return;
  user_error("%s: the mask beside it leaves no token to score in %lld of its %lld windows; take others (--windows), or "
             "remove it to score every token",
             text.path, (long long)windows.count, (long long)windows.all.count());
}

// Where the texts of a folder of tokens lie in rows, windows that begin elsewhere show a row the end of the one before.
void warn_of_rows(const Evaluator& e, const std::string& folder) {
  const int64_t rows = row_length_of(folder), context = e.results.context;
  if (rows > 0 && (context != rows || e.results.stride != rows))
    print_warning(format("%s: the texts lie in rows of %lld tokens, and windows of %lld tokens, %lld apart, cut them "
                         "elsewhere; --context %lld reads them as they lie",
                         folder.c_str(), (long long)rows, (long long)context, (long long)e.results.stride,
                         (long long)rows));
}

// Reads everything that is to be evaluated, and finds the longest sequence.
void read_inputs(Evaluator& e, const ModelConfig& config) {
  const EvaluateOptions& o = e.options;
  int64_t &context = e.results.context, &stride = e.results.stride;
  const int longest_text = config.longest_text();  // a model with memory reads a text in segments, however long it is
  context = o.context > 0 ? o.context : longest_text, stride = o.stride > 0 ? o.stride : context;
  if (context > longest_text)
    user_error("--context %lld: the model's context length is %d", (long long)context, config.max_seq_len);
  if (stride > context)
    user_error("--stride %lld: it must be at most the context, %lld: some tokens would be scored in no window",
               (long long)stride, (long long)context);
  choose_tokenizer(e, config.vocab_size);
  if (o.serve || !o.lambada.empty()) need_tokenizer(e, config.vocab_size);
  if (o.serve && !(o.json.empty() && o.positions.empty() && o.stride == 0 && o.windows == 0))
    user_error("--serve: answers go to stdout; leave out --json, --positions, --stride and --windows");
  e.results.positions = PositionLosses(std::min<int64_t>(context, config.max_seq_len));
  for (const std::string& path : o.files) add_file(e, path, config);
  for (const std::string& path : o.lambada) {
    e.last_words.push_back({path, {}});
    for (const auto& [text, word] : read_last_words(path))
      e.last_words.back().texts.push_back(encode_continuation(*e.tokenizer, text, word));
  }
  for (const TextToScore& text : e.texts) e.longest = std::max(e.longest, text.count() - 1);
  auto see = [&](const std::string& path, const char* what, size_t number, const ScoredSequence& s) {
    if (s.scored > context)
      user_error("%s: %s %zu: what is to be predicted has %lld tokens, but the context length is %lld", path, what,
                 number, (long long)s.scored, (long long)context);
    e.longest = std::max(e.longest, s.inputs());
  };
  for (const ChoicesToScore& c : e.choices)
    for (size_t i = 0; i < c.answers.size(); i++) see(c.path, "question", c.answers[i].first, c.sequence(i));
  for (const LastWordsToScore& words : e.last_words)
    for (size_t i = 0; i < words.texts.size(); i++) see(words.path, "text", i + 1, words.texts[i]);
  e.longest = o.serve ? longest_text : std::min(e.longest, context);
  if (o.context == 0 && !o.serve) context = std::min(context, std::max<int64_t>(e.longest, config.max_seq_len));
  stride = std::min(stride, context);
  std::set<std::string> folders;
  for (const TextToScore& text : e.texts) {
    check_scored(e, text);
    if (text.file) folders.insert(parent_folder(text.path));
  }
  for (const std::string& folder : folders) warn_of_rows(e, folder);
  if (!o.positions.empty() && e.texts.empty())
    user_error("--positions %s: only texts and files of tokens have losses by position; name one", o.positions);
}

// ----------------------------------------------------------------------------
// Evaluation

void evaluate_text(Evaluator& e, const TextToScore& text) {
  const ChosenWindows windows = chosen_windows(e, text);
  PositionLosses positions = e.results.positions;  // kept only if the text is scored to its end
  TextResult r = {text.path};
  r.knows_bytes = e.tokenizer.has_value(), r.has_mask = text.file && text.file->mask.exists();
  int64_t seen = 0;  // tokens, scored or not
  auto add = [&](int64_t i, const Scoring& s) {
    const TextWindows::Window window = windows[i];
    const std::vector<uint8_t> scored = text.scored(window.first, window.end);
    for (int64_t at = window.first; at < window.end; at++) {
      seen++;
      if (!scored[at - window.first]) continue;
      const double loss = double(s.losses[at - window.first]);
      const double ponder = s.ponder.empty() ? 0 : double(s.ponder[at - window.first]);
      r.tokens++, r.nats += loss, r.pondered += ponder, r.correct += s.likeliest[at - window.first];
      positions.add((at - window.begin - 1) % e.model.config.max_seq_len + 1, loss, ponder);
      const int64_t bytes = r.knows_bytes ? bytes_of_token(*e.tokenizer, s.sequence.tokens[at - window.begin]) : 0;
      if (bytes > 0) r.bytes += bytes, r.nats_of_bytes += loss;
    }
    e.count(s);
  };
  score_sequences(
      e.model, windows.count, [&](int64_t i) { return text.sequence(windows[i]); }, add);
  CHECK(windows.count < windows.all.count() || seen == windows.all.num_scored());
  e.results.texts.push_back(r);
  e.results.positions = std::move(positions);
}

// What ChoiceScore divides the log-likelihood of an answer by.
std::array<double, size_t(ChoiceScore::count)> divisors_of(const std::vector<uint16_t>& answer,
                                                           const Tokenizer* tokenizer) {
  std::array<double, size_t(ChoiceScore::count)> divisors = {1, double(answer.size()), 1, 1};
  if (tokenizer == nullptr) return divisors;
  std::string text;
  for (uint16_t token : answer)
    if (bytes_of_token(*tokenizer, token) > 0) text += tokenizer->token(token);
  if (text.size() > 1 && text[0] == ' ') text.erase(0, 1);
  const int64_t continuations = std::count_if(text.begin(), text.end(), is_continuation_byte);
  divisors[size_t(ChoiceScore::per_character)] = std::max(1.0, double(text.size()) - double(continuations));
  divisors[size_t(ChoiceScore::per_byte)] = std::max(1.0, double(text.size()));
  return divisors;
}

void evaluate_choices(Evaluator& e, const ChoicesToScore& c) {
  const Tokenizer* tokenizer = e.tokenizer ? &*e.tokenizer : nullptr;
  ChoiceResult r = {c.path, int64_t(c.questions.size())};
  r.knows_bytes = tokenizer != nullptr;
  // The best score so far among the question's answers; the first answer wins among equal ones.
  std::array<double, size_t(ChoiceScore::count)> best = {};
  std::array<size_t, size_t(ChoiceScore::count)> chosen = {};
  auto add = [&](int64_t i, const Scoring& s) {
    const auto [question, answer] = c.answers[i];
    const ChoiceQuestion& q = c.questions[question];
    const auto divisors = divisors_of(q.answers[answer], tokenizer);
    for (size_t k = 0; k < best.size(); k++) {
      const double score = -s.nats() / divisors[k];
      if (answer == 0 || score > best[k]) best[k] = score, chosen[k] = answer;
      if (answer + 1 == q.answers.size()) r.right[k] += int(chosen[k]) == q.right;
    }
    e.count(s);
  };
  auto make = [&](int64_t i) {
    ScoredSequence s = c.sequence(size_t(i));
    r.shortened += s.shorten(e.results.context);
    return s;
  };
  score_sequences(e.model, int64_t(c.answers.size()), make, add);
  e.results.choices.push_back(r);
}

void evaluate_last_words(Evaluator& e, const LastWordsToScore& words) {
  LastWordResult r = {words.path, int64_t(words.texts.size())};
  auto make = [&](int64_t i) {
    ScoredSequence s = words.texts[i];
    r.shortened += s.shorten(e.results.context);
    return s;
  };
  score_sequences(e.model, r.texts, make, [&](int64_t, const Scoring& s) {
    r.nats += s.nats(), r.right += s.all_likeliest();
    e.count(s);
  });
  e.results.last_words.push_back(r);
}

// ----------------------------------------------------------------------------
// Requests of another program

std::string answer_loglikelihood(Evaluator& e, const ServeRequest& request) {
  std::vector<ScoredSequence> sequences;  // all of them first, so that what is wrong with one costs no computing
  for (const auto& [context, continuation] : request.pairs)
    of_item(sequences.size(), context, [&, context = context, continuation = continuation] {
      sequences.push_back(encode_continuation(*e.tokenizer, context, continuation));
      sequences.back().shorten(e.results.context);
    });
  std::vector<std::pair<double, bool>> scores;
  score_sequences(
      e.model, int64_t(sequences.size()), [&](int64_t i) { return sequences[i]; },
      [&](int64_t, const Scoring& s) {
        scores.push_back({-s.nats(), s.all_likeliest()});
      });
  return serve_answer(request.name, scores);
}

// Each text after an end of text, in windows that share one token; the last one begins early enough to be full.
std::string answer_rolling(Evaluator& e, const ServeRequest& request) {
  std::vector<std::vector<int>> texts;
  std::vector<std::pair<size_t, TextWindows::Window>> windows;  // the text's index, and a window of it
  for (const std::string& text : request.texts) {
    texts.push_back(encode_prompt(*e.tokenizer, text));
    const TextWindows of_text = {int64_t(texts.back().size()), e.results.context, e.results.context,
                                 /*last_is_full=*/true};
    for (int64_t i = 0; i < of_text.count(); i++) windows.push_back({texts.size() - 1, of_text[i]});
  }
  std::vector<double> sums(texts.size(), 0);
  score_sequences(
      e.model, int64_t(windows.size()),
      [&](int64_t i) { return sequence_of(windows[i].second, texts[windows[i].first].data()); },
      [&](int64_t i, const Scoring& s) { sums[windows[i].first] -= s.nats(); });
  return serve_answer(request.name, sums);
}

// Only the end of a context is read, as much of it as leaves room for the tokens to draw. Requests that follow each
// other with the same options are sampled together.
std::string answer_generate(Evaluator& e, const ServeRequest& request) {
  std::vector<std::string> texts;
  for (size_t i = 0; i < request.generate.size(); i++)
    of_item(i, request.generate[i].context, [&] {
      const int64_t tokens = request.generate[i].options.tokens;
      if (tokens >= e.results.context)
        user_error("max_tokens %lld: the context length is %lld", (long long)tokens, (long long)e.results.context);
    });
  for (size_t first = 0, next; first < request.generate.size(); first = next) {
    const SampleOptions& o = request.generate[first].options;
    const int64_t room = e.results.context - o.tokens;
    std::vector<SampleRequest> requests;
    for (next = first; next < request.generate.size() && same_sampling(request.generate[next].options, o); next++) {
      const std::string& context = request.generate[next].context;
      std::vector<int> tokens = encode_prompt(*e.tokenizer, context, /*begins_with_end=*/context.empty());
      tokens.erase(tokens.begin(), tokens.end() - std::min<int64_t>(room, int64_t(tokens.size())));
      requests.push_back({context, tokens, uint64_t(o.seed)});
    }
    SamplingEngine engine = {o, *e.tokenizer, e.model, {}};
    engine.run(requests, /*show=*/false, [&](const Sampled& text) { texts.push_back(text.stream.text()); });
  }
  return serve_answer(request.name, texts);
}

// Answers requests until stdin ends. Whatever is wrong with a request is its answer.
void serve(Evaluator& e) {
  for (std::string line; std::getline(std::cin, line);) {
    std::string answer;
    try {
      const ServeRequest request = parse_serve_request(line);
      if (request.name == "loglikelihood") answer = answer_loglikelihood(e, request);
      else if (request.name == "loglikelihood_rolling") answer = answer_rolling(e, request);
      else answer = answer_generate(e, request);
    } catch (const UserError& error) { answer = serve_error(error.what()); }
    printf("%s\n", answer.c_str());
    flush_output();
  }
}

// ----------------------------------------------------------------------------
// main

void write_results(const Evaluator& e) {
  e.end_progress();
  print_results(e.results);
  const EvaluateOptions& o = e.options;
  std::string failed;  // one file that cannot be written is no reason to lose the other
  for (const auto& [path, text] :
       {std::pair(o.json, results_json(e.results)), std::pair(o.positions, positions_csv(e.results.positions))}) {
    try {
      if (!path.empty()) write_file_durably(path, text);
    } catch (const UserError& error) { failed += (failed.empty() ? "" : "; ") + std::string(error.what()); }
  }
  if (!failed.empty()) user_error("%s", failed);
  if (o.quiet) return;
  const double seconds = seconds_now() - e.start;
  fprintf(stderr, "%lld tokens read in %s, %.0f tokens/s; %s, %s; context %lld, stride %lld\n",
          (long long)e.tokens_read, time_text(seconds).c_str(), double(e.tokens_read) / seconds, precision_name,
          device_name(), (long long)e.results.context, (long long)e.results.stride);
}

// The files that names and glob patterns stand for. Throws UserError for a pattern that matches none.
std::vector<std::string> all_matching_files(const std::vector<std::string>& patterns) {
  std::vector<std::string> all;
  for (const std::string& pattern : patterns) {
    const std::vector<std::string> files = matching_files(pattern);
    if (files.empty()) user_error("%s: cannot be read: there is no such file, nor one that it matches", pattern);
    all.insert(all.end(), files.begin(), files.end());
  }
  return all;
}

// Throws UserError unless the results can be written, and replace nothing that is read.
void check_outputs(const EvaluateOptions& o) {
  std::vector<std::string> others = files_of_model(o.model);
  for (const std::string& file : o.files)
    others.insert(others.end(), {file, mask_path_of(file), Tokenizer::file_in(parent_folder(file)),
                                 parent_folder(file) + "/MANIFEST.json"});
  others.insert(others.end(), o.lambada.begin(), o.lambada.end());
  others.push_back(o.tokenizer);
  others.erase(std::remove(others.begin(), others.end(), ""), others.end());  // of what is not there
  for (const std::string& output : {o.json, o.positions}) {
    if (output.empty()) continue;
    check_output(output, others);
    others.push_back(output);
  }
}

int run_evaluator(int argc, char** argv) {
  EvaluateOptions o;
  if (!parse_evaluate_options(argc, argv, o)) return 0;
  const ModelConfig config = config_of(o.model, o.wiring);
  for (std::vector<std::string>* files : {&o.files, &o.lambada}) *files = all_matching_files(*files);
  check_outputs(o);
  Evaluator e(o);
  e.results.wiring = config.wiring.text;
  read_inputs(e, config);
  load_model(e.model, o.model, config, scoring_plan(o.slots, e.longest));
  gpt2_zero_loss(e.model);
  e.start = e.shown = seconds_now();
  if (o.serve) return serve(e), 0;
  std::string path;  // of what is being evaluated
  try {
    for (const TextToScore& text : e.texts) path = text.path, evaluate_text(e, text);
    for (const ChoicesToScore& c : e.choices) path = c.path, evaluate_choices(e, c);
    for (const LastWordsToScore& words : e.last_words) path = words.path, evaluate_last_words(e, words);
  } catch (const UserError& error) {
    e.end_progress();
    print_results(e.results);  // of what is before it
    user_error("%s: %s", path, error.what());
  }
  write_results(e);
  return 0;
}

int main(int argc, char** argv) {
  return run_program([&] {
    configure_threads(argv);
    return run_evaluator(argc, argv);
  });
}
