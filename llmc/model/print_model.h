// The lines about the model that a run begins with.
#pragma once
#include <cstdio>
#include "shape.h"
#include "attention_plan.h"
#include "flops.h"
#include "parameters.h"

// Prints the model's shape, whose K/V each head attends to, its parameters `p`, and what it costs relative to plain
// GPT-2.
inline void print_model(const ModelShape& model, int T, const ParameterTable& p) {
  const ModelConfig& c = model.config;
  printf("model: %d layers, %d heads of %d, %d channels, vocabulary %d, context length %d, %s\nwiring: %s\n",
         c.num_layers, c.num_heads, c.head_size(), c.channels, c.vocab_size, c.max_seq_len,
         c.bias ? "biases" : "no biases", c.wiring.text.c_str());
  if (!c.wiring.is_plain()) printf("%s", draw(model.attention_plan).c_str());
  const int64_t unused = p.num_parameters_full - p.num_parameters;
  printf("parameters: %lld", (long long)p.num_parameters);
  if (unused > 0)
    printf(" (%lld less %lld, %.2f %%, of q, k and v rows that no attention uses)", (long long)p.num_parameters_full,
           (long long)unused, 100.0 * double(unused) / double(p.num_parameters_full));
  printf("\n");
  ModelConfig plain = c;
  plain.wiring = Wiring();
  const AttentionPlan plain_plan = make_attention_plan(plain);
  const double kv = double(kv_bytes_per_token(c, model.attention_plan, sizeof(floatX))),
               plain_kv = double(kv_bytes_per_token(plain, plain_plan, sizeof(floatX)));
  const double flops = flops_per_token(c, model.attention_plan, T), plain_flops = flops_per_token(plain, plain_plan, T);
  const int64_t plain_parameters = make_parameter_table(plain, plain_plan).num_parameters;
  printf("relative to plain GPT-2: parameters %.1f %%; a token: K/V %.0f bytes, %.1f %%; at T %d %.4g GFLOP, %.1f %%\n",
         100 * double(p.num_parameters) / double(plain_parameters), kv, 100 * kv / plain_kv, T, flops * 1e-9,
         100 * flops / plain_flops);
}
