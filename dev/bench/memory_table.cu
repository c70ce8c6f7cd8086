// The largest micro-batch that fits on GPUs of several sizes, by the trainer's own plan: what it would print before it
// allocates, for the bf16 build. Nothing is allocated and no GPU is needed.
//
//   memory_table      Markdown to stdout; `make memory-table` builds and runs it
#define SLA_NO_MAIN
#include "train_gpt2_sla.cu"
#include "dev/bench/tables.h"
#include "llmc/train/print.h"

// One model: a row a length and level of recomputation, a column a size of GPU.
void print_table(const char* preset, const char* name) {
  const std::vector<int> gpu_gb = {16, 32, 80, 141};
  ModelConfig config;
  CHECK(config_from_preset(preset, config));
  printf("\n%s (`%s`), %s:\n\n| T | recomputed | bytes per sequence |", name, preset, config.wiring.text.c_str());
  for (int gb : gpu_gb) printf(" %d GB |", gb);
  printf("\n| --: | --- | --: |");
  for (size_t i = 0; i < gpu_gb.size(); i++) printf(" --: |");
  printf("\n");
  for (int T : {1024, 4096, 16384, 65536}) {
    for (int recompute : {0, 3, 4}) {
      config.max_seq_len = T;  // wpe has a row, and AdamW's state for it, a position
      GPT2 model;
      gpt2_declare(model, config, {1, T, Recompute(recompute)});
      printf("| %s | %s | %s |", thousands(T).c_str(),
             recompute == 0   ? "nothing (`-r 0`)"
             : recompute == 3 ? "all but K/V (`-r 3`)"
                              : "and MLPs in chunks (`-r 4`)",
             bytes_text(double(model.activations.layout.bytes - model.memory_plan[MemoryGroup::logits])).c_str());
      for (int gb : gpu_gb) {
        const int B = largest_batch_on(size_t(gb) * 1000000000, config, T, Recompute(recompute));
        printf(" %s |", B == 0 ? "-" : thousands(B).c_str());
      }
      printf("\n");
    }
  }
}

int main() {
  printf("# The largest micro-batch that fits\n\n"
         "In sequences of T tokens, by the memory plan that the trainer prints and allocates, weights, gradients and "
         "AdamW's state\n"
         "included, in %s. A GB is 10^9 bytes. A dash: not one sequence fits. Printed by `make memory-table`, without "
         "a GPU.\n\n"
         "As in the trainer's plan, %s are kept free for the kernels' code, graphs and NCCL. What the plan does not "
         "hold is CUDA's\n"
         "context, some hundred megabytes that depend on the GPU and the driver. The trainer compares its plan with "
         "what the driver says\n"
         "is free after that, so that its own limit can lie a little below this table's.\n",
         precision_name, bytes_text(double(device_reserve_bytes())).c_str());
  print_table("d12", "GPT-2 124M");
  print_table("d24", "GPT-2 350M");
  print_table("d36", "GPT-2 774M");
}
