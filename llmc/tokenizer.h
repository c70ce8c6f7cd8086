// Text to token ids and back.
//
// Byte-level: a token is a byte, 0 to 255, and one more, 256, marks the end of a text. Every input is valid, nothing
// is lost, and no vocabulary file is needed.
#pragma once
#include <cstddef>     // size_t
#include <cstdint>     // uint8_t, uint16_t
#include <string>      // std::string, std::to_string
#include <string_view> // std::string_view

constexpr int byte_vocab_size = 257;
constexpr uint16_t byte_end_of_text = 256;

// tokens[i] = text[i]; `tokens` holds text.size() of them.
inline void encode_bytes(std::string_view text, uint16_t* tokens) {
  for (size_t i = 0; i < text.size(); i++) tokens[i] = uint8_t(text[i]);
}

// The text of one token of a model with `vocab_size` tokens: its byte, or GPT-2's spelling of the end of text. The
// tokens of any other vocabulary are printed as numbers, each followed by a space.
inline std::string decode_token(int vocab_size, int token) {
  if (vocab_size != byte_vocab_size) return std::to_string(token) + " ";
  return token == byte_end_of_text ? "<|endoftext|>" : std::string(1, char(token));
}
