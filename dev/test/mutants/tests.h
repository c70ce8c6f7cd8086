// Which tests notice a change of a file: the one list of them.
#pragma once
#include <string>   // std::string
#include <utility>  // std::pair
#include <vector>   // std::vector

namespace mutants {

// A test program in build/ and those of its tests that are run.
struct TestRun {
  std::string program, filter;
};

struct Coverage {
  std::string prefix;          // of the paths of the files that it is for
  std::vector<TestRun> tests;  // quickest first: a mutant is done with when one of them fails
};

// The first line whose prefix a path has is for it.
inline const std::vector<Coverage>& coverage() {
  const std::string cpu = "build/fp32/test_gpt2_sla_cpu", emu = "build/fp32/test_gpt2_sla_emu",
                    emu_bf16 = "build/bf16/test_gpt2_sla_emu";
  const std::string quick_graph = "*Graph*/no_bias:*Graph*/adjacent:*Graph*/chains:*Graph*/several_query*";
  const std::string quick_attention = "-*EveryLength*", all_attention = "*EveryLength*";
  static const std::vector<Coverage> table = {
      {"llmc/cuda/attention_maps.h",
       {{emu, "*Graph.HasTheLosses*/gate*:*Graph.HasTheLosses*/blend*"}, {emu_bf16, "*Graph.HasTheLosses*/gate*"}}},
      {"llmc/cpu/attention_maps.h", {{cpu, "*Graph.HasTheLosses*/gate*:*Graph.HasTheLosses*/blend*"}}},
      {"llmc/cuda/attention_bf16.h",
       {{"build/bf16/test_attention_emu", quick_attention}, {"build/bf16/test_attention_emu", all_attention}}},
      {"llmc/cuda/attention_t",  // tiles and topk: some of each is for one precision
       {{"build/bf16/test_attention_emu", quick_attention}, {"build/fp32/test_attention_emu", quick_attention}}},
      {"llmc/cuda/attention",
       {{"build/fp32/test_attention_emu", quick_attention}, {"build/fp32/test_attention_emu", all_attention}}},
      {"llmc/cuda/tile.h",
       {{"build/bf16/test_tile_emu", "*"},
        {"build/bf16/test_attention_emu", quick_attention},
        {"build/bf16/test_attention_emu", all_attention}}},
      {"llmc/dist/collectives", {{"build/test_dist", "*"}}},
      {"llmc/cuda/device.h", {{emu, "Bits.*:Steps.*"}, {"build/bf16/test_memory_emu", "*"}}},
      {"llmc/cuda/matmul.h",
       {{"build/fp32/test_ops_emu", "Matmul.*"}, {"build/bf16/test_ops_emu", "Matmul.*"}, {emu, "Generation.*"}}},
      {"llmc/cuda/", {{"build/fp32/test_ops_emu", "*"}, {"build/bf16/test_ops_emu", "*"}}},
      {"llmc/cpu/attention.h",
       {{"build/fp32/test_attention_cpu", quick_attention},
        {"build/bf16/test_attention_cpu", quick_attention},
        {"build/fp32/test_attention_cpu", all_attention}}},
      {"llmc/cpu/bf16.h", {{"build/fp32/test_ops_cpu", "Bf16.*"}}},
      {"llmc/cpu/threads.h", {{"build/fp32/test_ops_cpu", "Threads.*"}, {"build/test_cli", "*Threads*"}}},
      {"llmc/cpu/", {{"build/fp32/test_ops_cpu", "*"}, {"build/bf16/test_ops_cpu", "*"}, {cpu, quick_graph}}},
      {"llmc/model/config_json", {{"build/test_files", "*Json*"}, {"build/test_bad_input", "*BadModels*"}}},
      {"llmc/model/orthogonalize.h", {{cpu, "Updates.OfMatrices*"}}},
      {"llmc/model/wiring_picture", {{"build/test_report", "WiringPicture.*"}}},
      {"llmc/model/reference.h", {{"build/test_reference", "*"}}},
      {"llmc/model/flops.h", {{"build/test_plan", "Flops.*"}, {cpu, "DeadRows.AreWhat*"}}},
      {"llmc/model/", {{"build/test_plan", "*"}, {"build/test_files", "*"}, {cpu, quick_graph}, {cpu, "*"}}},
      {"llmc/utils/arena.h", {{"build/test_plan", "Arena.*"}, {emu, quick_graph}}},
      {"llmc/utils/crc32c.h", {{"build/test_files", "Crc32c.*"}, {"build/test_safetensors", "*"}}},
      {"llmc/utils/files",
       {{"build/test_files", "*"}, {"build/test_safetensors", "*"}, {"build/test_bad_input", "*Full*"}}},
      {"llmc/utils/memory_plan.h", {{"build/bf16/test_memory_emu", "*"}}},
      {"llmc/utils/number.h", {{"build/test_options", "Numbers.*"}}},
      {"llmc/utils/parameter_table.h", {{"build/test_plan", "*"}, {"build/test_files", "*"}, {cpu, quick_graph}}},
      {"llmc/utils/utf8.h", {{"build/test_tokenizer", "*"}}},
      {"llmc/utils/random.h", {{"build/test_plan", "Random.*"}}},
      {"llmc/io/safetensors", {{"build/test_safetensors", "*"}, {"build/test_files", "*"}}},
      {"llmc/io/",
       {{"build/test_files", "*"}, {"build/test_resume", "*Checkpoint*:*Killed*"}, {"build/test_bad_input", "*Full*"}}},
      {"llmc/run/evaluation", {{"build/test_evaluate", "*"}}},
      {"llmc/run/sampling", {{"build/test_sampling", "*"}}},
      {"llmc/run/report", {{"build/test_report", "*"}}},
      {"llmc/run/position_losses", {{"build/test_report", "*Position*"}, {"build/test_evaluate", "*Position*"}}},
      {"llmc/run/run_history", {{"build/test_report", "Report.*"}}},
      {"llmc/run/statistics.h", {{"build/test_report", "Statistics.*"}, {"build/test_report", "Report.OverSeeds*"}}},
      {"llmc/run/thin.h", {{"build/test_report", "Thinning.*:Report.Of18000*"}}},
      {"llmc/run/event_file", {{"build/test_report", "*EventFiles*"}}},
      {"llmc/run/schedule.h", {{"build/test_plan", "Schedule.*"}}},
      {"llmc/run/stop_signal.h", {{"build/test_resume", "*Signal*"}}},
      {"llmc/run/timeline.h", {{"build/test_dist", "*Layers*"}}},
      {"llmc/run/config_toml", {{"build/test_options", "*Toml*:*Config*"}}},
      {"llmc/run/model_options", {{"build/test_options", "Model*"}, {"build/test_resume", "*Refused"}}},
      {"llmc/run/option",
       {{"build/test_options", "Options.*"}, {"build/test_cli", "-*Emulated*:*emulated*:*Gpus*:*Tf32*:Fuzzer*"}}},
      {"llmc/run/memory_plan.h", {{"build/bf16/test_memory_emu", "*"}}},
      {"llmc/run/",
       {{"build/test_run", "*"},
        {"build/test_cli", "-*Emulated*:*emulated*:*Gpus*:*Tf32*:Fuzzer*"},
        {"build/test_dist", "Training.*"}}},
      {"llmc/dist/tcp", {{"build/test_rank_channel", "Channel.*"}}},
      {"llmc/dist/rank_channel", {{"build/test_rank_channel", "Channel.*"}}},
      {"llmc/dist/watchdog.h", {{"build/test_rank_channel", "WatchdogTest.*"}, {"build/test_rank_channel", "*"}}},
      {"llmc/dist/", {{"build/test_dist", "*"}}},
      {"llmc/text/choice_file", {{"build/test_evaluate", "*"}}},
      {"llmc/text/scored_text.h", {{"build/test_evaluate", "*"}}},
      {"llmc/text/sampler.h", {{"build/test_plan", "Sampler.*"}}},
      {"llmc/text/text_stream.h", {{"build/test_plan", "TextStream.*"}}},
      {"llmc/text/tokenizer", {{"build/test_tokenizer", "*"}}},
      {"llmc/text/unicode_classes.h", {{"build/test_tokenizer", "*"}}},
      {"llmc/text/", {{"build/test_loader", "*"}}},
      {"data/convert", {{"build/test_formats", "*"}}},
      {"data/", {{"build/test_data", "*"}, {"build/test_corpus", "*"}}},
      {"dev/emu_amx/", {{"build/test_amx", "Tiles.*"}, {"build/test_amx", "*operations"}}},
      {"dev/emu/nccl.cpp", {{"build/test_dist", "EmulatedNccl.*"}}},
      {"dev/emu/",
       {{"build/test_emu", "*"},
        {"build/test_emu_streams", "*"},
        {"build/test_emu_cublaslt", "*"},
        {"build/bf16/test_tile_emu", "*"}}},
      {"llmc/attention_mask.h",
       {{"build/test_plan", "AttentionMask.*"},
        {"build/fp32/test_attention_cpu", "*"},
        {"build/fp32/test_attention_emu", quick_attention}}},
      {"llmc/muon.h", {{"build/fp32/test_ops_cpu", "Muon.*"}, {cpu, "Updates.OfMatrices*"}}},
      {"llmc/map_weights.h", {{cpu, "*Graph.HasTheLosses*/gate*:*Graph.HasTheLosses*/blend*"}}},
      {"llmc/a", {{"build/fp32/test_ops_cpu", "*"}, {"build/fp32/test_attention_cpu", "*"}}},
      {"evaluate_gpt2_sla.cu", {{"build/test_evaluate", "*"}}},
      {"report.cpp", {{"build/test_report", "*"}}},
      {"sample_gpt2_sla.cu", {{"build/test_sampling", "*"}}},
      {"train_gpt2_sla.cu",
       {{cpu, quick_graph},
        {cpu, "-*Updates*:DeadRows.DoNot*"},
        {emu, "Steps.*:Bits.*:Memory.*"},
        {"build/bf16/test_memory_emu", "*"},
        {"build/test_cli", "-*Emulated*:*emulated*:*Gpus*:*Tf32*:Fuzzer*"},
        {"build/test_dist", "Training.*"}}},
  };
  return table;
}

// Programs that a test program runs, by the files that it tests: `make` builds them with it.
inline std::vector<std::string> programs_run_by(const std::string& test) {
  if (test == "build/test_cli" || test == "build/test_resume" || test == "build/test_bad_input")
    return {"build/fp32/train_gpt2_sla_cpu"};
  if (test == "build/test_scripts" || test == "build/test_faults")
    return {"build/fp32/train_gpt2_sla_cpu", "build/fp32/train_gpt2_sla_emu", "report"};
  if (test == "build/test_dist")
    return {"build/fp32/train_gpt2_sla_cpu", "build/fp32/train_gpt2_sla_emu", "build/bf16/train_gpt2_sla_emu",
            "build/emu_ranks"};
  if (test == "build/test_sampling") return {"build/fp32/sample_gpt2_sla_cpu", "build/fp32/train_gpt2_sla_cpu"};
  if (test == "build/test_evaluate")
    return {"build/fp32/evaluate_gpt2_sla_cpu", "build/fp32/evaluate_gpt2_sla_emu", "build/fp32/sample_gpt2_sla_cpu",
            "build/fp32/train_gpt2_sla_cpu", "data/convert"};
  if (test == "build/test_amx")
    return {"build/emulated_amx.so", "build/onednn_cpuid.txt", "build/bf16/test_ops_cpu",
            "build/bf16/train_gpt2_sla_cpu"};
  if (test == "build/test_formats") return {"data/convert"};
  if (test == "build/test_report") return {"build/fp32/train_gpt2_sla_cpu", "report"};
  if (test == "build/test_data" || test == "build/test_corpus") return {"data/tokenize"};
  return {};
}

// The tests that cover a file; none, if no line of the list is for it.
inline std::vector<TestRun> tests_of(const std::string& path) {
  for (const Coverage& line : coverage())
    if (path.compare(0, line.prefix.size(), line.prefix) == 0) return line.tests;
  return {};
}

}  // namespace mutants
