// Texts as sequences of tokens that are scored: how lm-evaluation-harness splits them, and in which windows.
#include "helpers.h"
#include "llmc/text/scored_text.h"

static std::vector<int> bytes_of(const std::string& text) {
  std::vector<int> bytes;
  for (const char c : text) bytes.push_back(uint8_t(c));
  return bytes;
}

TEST(ScoredText, WhiteSpaceOfEachKindBelongsToTheContinuation) {
  const Tokenizer tokenizer = Tokenizer::bytes();
  for (const std::string space : {" ", "\t", "\n", "\v", "\f", "\r", "\x1c", "\x1f", "\u0085", "\u00a0", "\u3000"}) {
    const ScoredSequence s = encode_continuation(tokenizer, "two" + space + space, "end");
    EXPECT_EQ(s.tokens, bytes_of("two" + space + space + "end")) << space;
    EXPECT_EQ(s.scored, 3 + 2 * int64_t(space.size())) << space;
  }
  EXPECT_EQ(encode_continuation(tokenizer, "two\u200b", "end").scored, 3) << "it has no width, and is no white space";
}

// Where a merge goes across the boundary, the context has the tokens that it has by itself, and the continuation those
// that both together have after as many.
TEST(ScoredText, AMergeAcrossTheBoundaryLeavesTheContextItsTokens) {
  const Tokenizer tokenizer = Tokenizer::load("dev/test/tokenizer/small.tiktoken");
  const std::string text = "the other layers attend to the values of these";
  const std::vector<int> whole = encode_prompt(tokenizer, text, /*begins_with_end=*/false);
  int across = 0;
  for (size_t at = 1; at + 8 < text.size(); at++) {
    if (text[at - 1] == ' ') continue;
    std::vector<int> expected = encode_prompt(tokenizer, text.substr(0, at), /*begins_with_end=*/false);
    expected.insert(expected.end(), whole.begin() + long(expected.size()), whole.end());
    EXPECT_EQ(encode_continuation(tokenizer, text.substr(0, at), text.substr(at)).tokens, expected) << at;
    across += expected != whole;
  }
  EXPECT_GT(across, 0);
}

TEST(ScoredText, WhiteSpaceAloneStaysAContext) {
  const Tokenizer tokenizer = Tokenizer::bytes();
  EXPECT_EQ(encode_continuation(tokenizer, " \n", "end").scored, 3);
  const ScoredSequence s = encode_continuation(tokenizer, "", "end");
  EXPECT_EQ(s.scored, 3);
  EXPECT_EQ(s.tokens.front(), tokenizer.end_of_text());
}

TEST(ScoredText, AContinuationThatFillsTheContextIsScored) {
  ScoredSequence fills = {{0, 1, 2, 3, 4}, 4};
  EXPECT_FALSE(fills.shorten(4)) << "nothing is left out";
  EXPECT_EQ(fills.tokens.size(), 5u);
  ScoredSequence follows = {{0, 1, 2, 3, 4, 5}, 4};
  EXPECT_TRUE(follows.shorten(4));
  EXPECT_EQ(follows.tokens, (std::vector<int>{1, 2, 3, 4, 5}));
  EXPECT_ERROR((ScoredSequence{{0, 1, 2, 3, 4, 5}, 5}.shorten(4)), "5 tokens are to be scored at once, but the context "
                                                                   "length is 4");
}

TEST(ScoredText, EachTokenIsScoredInOneWindowWithWhatIsPromised) {
  for (int64_t n = 0; n <= 20; n++)
    for (int64_t context = 1; context <= 8; context++)
      for (int64_t stride = 1; stride <= context; stride++)
        for (const bool last_is_full : {false, true}) {
          SCOPED_TRACE(testing::Message() << n << " tokens, context " << context << ", stride " << stride);
          const TextWindows windows = {n, context, stride, last_is_full};
          int64_t next = 1;  // the token to be scored next
          for (int64_t i = 0; i < windows.count(); i++) {
            const TextWindows::Window w = windows[i];
            EXPECT_EQ(w.first, next);
            EXPECT_LT(w.first, w.end) << "a window that scores nothing";
            EXPECT_LE(w.end - 1 - w.begin, context);
            EXPECT_GE(w.first - w.begin, std::min(w.first, context - stride + 1)) << "tokens before the first";
            if (last_is_full && i + 1 == windows.count()) { EXPECT_EQ(w.end - 1 - w.begin, std::min(context, n - 1)); }
            next = w.end;
          }
          EXPECT_EQ(next, std::max<int64_t>(n, 1));
        }
}

TEST(ScoredText, EndsOfTextAndIdsBeyondTheVocabularyHaveNoBytes) {
  const Tokenizer tokenizer = Tokenizer::bytes();
  EXPECT_EQ(bytes_of_token(tokenizer, 'a'), 1);
  EXPECT_EQ(bytes_of_token(tokenizer, tokenizer.end_of_text()), 0);
  EXPECT_EQ(bytes_of_token(tokenizer, tokenizer.vocab_size()), 0);
}
