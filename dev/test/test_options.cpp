// Tests of the command line's options, and of the numbers in them.
#include <gtest/gtest.h>
#include <cstdint>              // INT64_MAX
#include <cstring>              // memcpy
#include <limits>               // std::numeric_limits
#include <random>               // std::mt19937_64
#include "helpers.h"            // EXPECT_ERROR
#include "llmc/utils/number.h"  // parse_number
#include "llmc/utils/text.h"    // shortest

// ----------------------------------------------------------------------------
// Numbers

TEST(Numbers, AreReadInEveryDecimalForm) {
  for (const char* half : {"0.5", ".5", "+.5", "5e-1", "0.05e1", "50E-2"}) EXPECT_EQ(parse_number<double>(half), 0.5);
  EXPECT_EQ(parse_number<double>("5."), 5);
  EXPECT_EQ(parse_number<double>("-3"), -3);
  EXPECT_EQ(parse_number<int>("+12"), 12);
  EXPECT_EQ(parse_number<int>("-010"), -10) << "no octal number";
  EXPECT_EQ(parse_number<int64_t>("9223372036854775807"), INT64_MAX);
  EXPECT_EQ(parse_number<int64_t>("-9223372036854775808"), INT64_MIN);
}

TEST(Numbers, ThatAreDenormalAreNumbers) {
  EXPECT_EQ(parse_number<double>("1e-310"), 1e-310);
  EXPECT_EQ(parse_number<double>("-1e-310"), -1e-310);
  EXPECT_EQ(parse_number<double>("4.9406564584124654e-324"), std::numeric_limits<double>::denorm_min());
}

TEST(Numbers, ComeBackFromTheirShortestText) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 100000; i++) {
    const uint64_t bits = random();
    double x;
    memcpy(&x, &bits, sizeof x);
    if (x - x != 0) continue;  // infinite, or NaN
    EXPECT_EQ(parse_number<double>(shortest(x)), x) << shortest(x);
  }
}

TEST(Numbers, ThatNoTypeHoldsAreRefused) {
  for (const char* text : {"1e400", "-1e400", "1e-400"})
    EXPECT_ERROR(parse_number<double>(text), std::string(text) + ": is out of range");
  EXPECT_ERROR(parse_number<int64_t>("9223372036854775808"), "9223372036854775808: is out of range");
  EXPECT_ERROR(parse_number<int>("-2147483649"), "-2147483649: is out of range");
}

TEST(Numbers, TextThatIsNoNumberIsRefused) {
  for (const char* text : {"", " 1", "1 ", "1e", "1e-3e", "1,5", "0x10", "--1", "+-1", "-+1", "+", ".", "e5", "inf",
                           "-inf", "infinity", "nan", "nan(0)", "many"}) {
    EXPECT_ERROR(parse_number<double>(text), std::string(text) + ": is not a number");
    EXPECT_ERROR(parse_number<int>(text), std::string(text) + ": is not a whole number");
  }
  for (const char* text : {"4.5", "1e3", "5."}) EXPECT_ERROR(parse_number<int>(text), "is not a whole number");
}
