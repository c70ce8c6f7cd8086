#include "choice_file.h"
#include <algorithm>
#include <cstring>
#include "llmc/base/error.h"
#include "llmc/base/files.h"

constexpr int32_t choice_file_version = 1;
constexpr size_t header_ints = 256;
constexpr uint16_t question_begin = 65535;

// Takes a file's numbers from front to back.
struct ChoiceReader {
  const char* path;
  int vocab_size;
  std::vector<uint16_t> numbers;
  size_t at = 0;
  long long question = 0;

  template <class... Args>
  [[noreturn]] void fail(const char* fmt, Args... args) const {
    user_error("%s: question %lld: %s; make the file again", path, question, format(fmt, args...));
  }
  int next() {
    if (at == numbers.size()) fail("the file ends in it: it is truncated");
    return numbers[at++];
  }
  std::vector<uint16_t> next_tokens(const char* what) {
    const int count = next();
    if (count == 0) fail("its %s has no token", what);
    std::vector<uint16_t> tokens;
    for (int i = 0; i < count; i++) {
      tokens.push_back(uint16_t(next()));
      if (tokens.back() >= vocab_size)
        fail("token %d of its %s is outside the model's vocabulary of %d", int(tokens.back()), what, vocab_size);
    }
    return tokens;
  }
  ChoiceQuestion next_question() {
    ChoiceQuestion q;
    const size_t begin = at;
    if (next() != question_begin) fail("it does not begin with %d", int(question_begin));
    const int bytes = next();
    if (const int index = next(); index != question) fail("it says that it is question %d", index);
    q.right = next();
    const int answers = next();
    if (answers < 2 || q.right >= answers)
      fail("it has %d answers, and says that the right one is %d, counted from 0", answers, q.right);
    q.context = next_tokens("context");
    for (int i = 0; i < answers; i++) q.answers.push_back(next_tokens("answer"));
    if (const size_t read = (at - begin) * sizeof(uint16_t); read != size_t(bytes))
      fail("it says %d bytes, but has %zu", bytes, read);
    return q;
  }
};

std::vector<ChoiceQuestion> read_choice_file(const std::string& path, int vocab_size) {
  const std::string bytes = read_whole_file(path, most_text_bytes);
  int32_t header[3] = {0, 0, 0};  // magic, version, number of questions
  const size_t header_bytes = header_ints * sizeof(int32_t);
  memcpy(header, bytes.data(), std::min(bytes.size(), sizeof header));
  if (header[0] != choice_file_magic)
    user_error("%s: bad magic %d; a file of questions begins with %d", path, header[0], choice_file_magic);
  if (header[1] != choice_file_version)
    user_error("%s: is a file of questions of version %d; only version %d is known", path, header[1],
               choice_file_version);
  if (bytes.size() < header_bytes || bytes.size() % 2 != 0 || header[2] < 1)
    user_error("%s: has %zu bytes and says %d questions: it is truncated or empty; make it again", path, bytes.size(),
               header[2]);
  ChoiceReader reader = {path.c_str(), vocab_size,
                         std::vector<uint16_t>((bytes.size() - header_bytes) / sizeof(uint16_t))};
  memcpy(reader.numbers.data(), bytes.data() + header_bytes, bytes.size() - header_bytes);
  std::vector<ChoiceQuestion> questions;
  for (; reader.question < header[2]; reader.question++) questions.push_back(reader.next_question());
  if (reader.at != reader.numbers.size())
    user_error("%s: is longer than its %d questions; make it again", path, header[2]);
  return questions;
}

void write_choice_file(const std::string& path, const std::vector<ChoiceQuestion>& questions) {
  if (questions.size() > 65535)
    user_error("%s: %zu questions, but the format has room for 65535", path, questions.size());
  std::vector<uint16_t> numbers;
  size_t longest = 0;
  auto add_tokens = [&](const std::vector<uint16_t>& tokens) {
    numbers.push_back(uint16_t(tokens.size()));
    numbers.insert(numbers.end(), tokens.begin(), tokens.end());
  };
  for (size_t i = 0; i < questions.size(); i++) {
    const ChoiceQuestion& q = questions[i];
    const size_t begin = numbers.size();
    numbers.insert(numbers.end(), {question_begin, 0, uint16_t(i), uint16_t(q.right), uint16_t(q.answers.size())});
    add_tokens(q.context);
    for (const std::vector<uint16_t>& answer : q.answers) add_tokens(answer);
    const size_t bytes = (numbers.size() - begin) * sizeof(uint16_t);
    if (bytes > 65535)
      user_error("%s: question %zu takes %zu bytes, but the format has room for 65535", path, i, bytes);
    numbers[begin + 1] = uint16_t(bytes);
    longest = std::max(longest, bytes);
  }
  const int32_t header[header_ints] = {choice_file_magic, choice_file_version, int32_t(questions.size()),
                                       int32_t(longest)};
  check_free_name(path);
  OutputFile file(path);
  file.write(header, sizeof header);
  file.write(numbers.data(), numbers.size() * sizeof(uint16_t));
  file.finish();
}
