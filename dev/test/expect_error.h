// For tests of user errors.
#pragma once
#include <gtest/gtest.h>    // EXPECT_NE
#include <string>           // std::string
#include "llmc/error.h"     // UserError

// The message of the UserError that `f` throws; "" if it throws none.
template <class F>
std::string error_of(F f) {
  try {
    f();
  } catch (const UserError& e) {
    return e.what();
  }
  return "";
}

#define EXPECT_ERROR(statement, part)                                                             \
  do {                                                                                            \
    std::string message = error_of([&] { statement; });                                           \
    EXPECT_NE(message.find(part), std::string::npos) << "the message is: \"" << message << "\"";  \
  } while (0)
