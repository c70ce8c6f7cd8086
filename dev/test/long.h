// Marks of the tests that take long: `make test` runs all tests but those whose name begins with Long.
//
// Host tests have the mark in the name of their suite. These macros are for tests that take long on the emulated GPU
// alone:
//   TEST(LONG_ON_EMU(Steps), HaveTheBitsOfTheSameWorkDoneEagerly) {
//   INSTANTIATE(LONG_ON_EMU(OtherWiring), Graph, testing::ValuesIn(cases), name_of);
#pragma once
#include <gtest/gtest.h>

#ifdef SLA_EMU
#define LONG_ON_EMU(name) Long##name
#else
#define LONG_ON_EMU(name) name
#endif

// INSTANTIATE_TEST_SUITE_P with a macro for its prefix.
#define INSTANTIATE(prefix, ...) INSTANTIATE_TEST_SUITE_P(prefix, __VA_ARGS__)
