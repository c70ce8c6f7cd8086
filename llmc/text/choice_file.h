// Multiple-choice questions as tokens, in llm.c's format for evaluation (HellaSwag, MMLU): 256 int32 (magic, version,
// number of questions, bytes of the longest one, zeros), then uint16. A question is 65535, its bytes, its index, the
// index of the right answer, the number of answers, then the context and each answer: the number of its tokens, and the
// tokens.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

constexpr int32_t choice_file_magic = 20240522;

struct ChoiceQuestion {
  std::vector<uint16_t> context;
  std::vector<std::vector<uint16_t>> answers;  // each a continuation of the context
  int right = 0;                               // the index of the right one
};

// Throws UserError, naming the file and the question, if it is not of this format, is shorter or longer than it says,
// or has a token that is not below `vocab_size`. Each question has a context, two answers or more, and none of them is
// empty.
std::vector<ChoiceQuestion> read_choice_file(const std::string& path, int vocab_size);

// Throws UserError for more than 65,535 questions, or one of more than 65,535 bytes: the format has no room for them;
// and if the file exists.
void write_choice_file(const std::string& path, const std::vector<ChoiceQuestion>& questions);
