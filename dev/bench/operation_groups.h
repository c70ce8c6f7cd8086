// Operations of a training step that benchmarks and the GPU model add up, by their names.
#pragma once
#include <string>
#include <vector>

const std::vector<std::string> attention_operations = {"attention_forward", "attention_backward"};
// Sums of what several layers have projected or put out.
const std::vector<std::string> layer_sums =
    {"mix_values",         "mix_values_backward",     "mix_heads",
     "mix_heads_backward", "depth_attention_forward", "depth_attention_backward",
     "weighted_sum",       "weighted_sum_backward"};
