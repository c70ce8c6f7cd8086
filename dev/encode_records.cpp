// Encodes what it is given on standard input, for dev/tokenizer_compare.py to compare: encode_records VOCABULARY.
//
// A record is 4 bytes with a length, and as many bytes of any kind. For each it prints the number of sequences that are
// no UTF-8, the number of tokens and the tokens, as uint32, of the text with U+FFFD in their place; and checks that the
// bytes themselves come back from their tokens, and that cutting the text where last_cut says changes nothing.
#include <cstdio>
#include <string>
#include <vector>
#include "llmc/base/error.h"
#include "llmc/text/tokenizer.h"

static void encode_records(const Tokenizer& tokenizer) {
  Encoder encoder(tokenizer);
  std::vector<uint16_t> tokens, parts;
  std::vector<uint32_t> printed;
  std::string bytes, text;
  for (uint32_t length; fread(&length, sizeof length, 1, stdin) == 1;) {
    bytes.resize(length);
    CHECK(fread(bytes.data(), 1, length, stdin) == length);
    tokens.clear();
    encoder.encode(bytes, tokens);
    std::string decoded;
    for (uint16_t token : tokens) decoded += tokenizer.token(token);
    CHECK(decoded == bytes);

    const int64_t replaced = replace_invalid_utf8(bytes, text);
    const std::string& valid = replaced > 0 ? text : bytes;
    tokens.clear();
    encoder.encode(valid, tokens);
    parts.clear();
    const size_t cut = tokenizer.last_cut(valid);
    encoder.encode(std::string_view(valid).substr(0, cut), parts);
    encoder.encode(std::string_view(valid).substr(cut), parts);
    CHECK(parts == tokens);

    printed = {uint32_t(replaced), uint32_t(tokens.size())};
    printed.insert(printed.end(), tokens.begin(), tokens.end());
    CHECK(fwrite(printed.data(), sizeof printed[0], printed.size(), stdout) == printed.size());
  }
}

int main(int argc, char** argv) {
  try {
    if (argc != 2) user_error("usage: encode_records VOCABULARY <records >tokens");
    encode_records(Tokenizer::load(argv[1]));
  } catch (const UserError& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
