// Model configurations from their sizes, and the messages of user errors.
#pragma once
#include <gtest/gtest.h>
#include <string>
#include "llmc/wiring/config.h"
#include "llmc/base/error.h"

inline ModelConfig make_config(int L, int h, int C, int n_l, int n_h) {
  ModelConfig c;
  c.num_layers = L, c.num_heads = h, c.channels = C, c.wiring = skip_layer_wiring(n_l, n_h);
  return c;
}

// The message of the UserError that `f` throws; "" if it throws none.
template <class F>
std::string error_of(F f) {
  try {
    f();
  } catch (const UserError& e) { return e.what(); }
  return "";
}

#define EXPECT_ERROR(statement, part)                                                            \
  do {                                                                                           \
    std::string message = error_of([&] { statement; });                                          \
    EXPECT_NE(message.find(part), std::string::npos) << "the message is: \"" << message << "\""; \
  } while (0)
