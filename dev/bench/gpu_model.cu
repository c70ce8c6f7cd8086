// How long a training step should take on a GPU, by operation and by arithmetic (gpu_model.h), from the trainer's own
// plan. Nothing is allocated and no GPU is needed.
//
//   gpu_model                   dev/bench/gpu-model.md to stdout; `make gpu-model` writes it and the next
//   gpu_model --gpus            dev/bench/gpus.md to stdout
//   gpu_model --model d24 --wiring 'sla(18,12)' -b 8 -t 1024        the tables of one model; --help
#define SLA_NO_MAIN
#include "train_gpt2_sla.cu"

#include <CLI/CLI.hpp>
#include <sstream>
#include "dev/bench/gpu_model.h"
#include "dev/bench/operation_groups.h"
#include "dev/bench/tables.h"
#include "llmc/base/files.h"
#include "llmc/model/flops.h"
#include "llmc/model/limit.h"

// The terms by which a layer uses what other layers projected or put out, beside plain.
const std::vector<std::string> wirings_of_sources = {"plain", "sla(9,9)", "sla(9,9,v)", "sla(9,9,k)",
                                                     "vres",  "router",   "depth",      "dense"};

const std::string small = "8 layers of 256";  // a model that is no preset

// What is modelled: a column of the tables for each GPU and wiring.
struct Case {
  std::string model = "d12";
  std::vector<std::string> wirings;  // none: the model's own and plain
  int B = 16, T = 1024, recompute = 0;
  int documents = INT_MAX;  // tokens in a document, with the term `documents`
};

struct Column {
  GpuSpec gpu;
  std::string wiring;
  std::vector<ModelledOperation> step;
  double flops;  // that the model needs
  int64_t tokens;
  int64_t kv_bytes;  // of a token

  double seconds() const { return modelled_seconds(step); }
  double tokens_per_second() const { return double(tokens) / seconds(); }
};

double matmul_seconds(const Column& column) {
  double sum = 0;
  for (const ModelledOperation& operation : column.step)
    for (const ModelledPart& part : operation.parts) sum += part.tiles.m > 0 ? part.seconds : 0;
  return sum;
}

// The places of tokens in documents of `length` tokens each.
std::vector<double> places_in_documents(int length) { return std::vector<double>(size_t(length), 1.0 / length); }

// A byte-level model as small as those that a CPU trains in minutes.
ModelConfig small_model() {
  ModelConfig config;
  config.num_layers = config.num_heads = 8, config.channels = 256, config.vocab_size = 257, config.max_seq_len = 256;
  config.wiring = parse_wiring("sla(6,6)");
  return config;
}

std::vector<Column> columns_of(const Case& c, const std::vector<GpuSpec>& gpus = {h100_sxm(), a100_sxm()}) {
  ModelConfig config = small_model();
  if (c.model != small && !config_from_preset(c.model, config))
    user_error("--model %s: no such model; d12, d24, d36, d48 or gpt3:768 and so on", c.model.c_str());
  config.max_seq_len = std::max(config.max_seq_len, c.T);
  std::vector<std::string> wirings = c.wirings;
  if (wirings.empty()) wirings = {config.wiring.text, "plain"};
  std::vector<double> places;
  if (c.documents < c.T) places = places_in_documents(c.documents);
  std::vector<Column> columns;
  for (const GpuSpec& gpu : gpus)
    for (const std::string& wiring : wirings) {
      config.wiring = parse_wiring(wiring);
      Segments segments;
      if (config.wiring_table().documents && !places.empty()) segments.places = &places;
      GPT2 model;
      PlanOptions options = {c.B, c.T, Recompute(c.recompute)};
      options.logit_bytes = logit_chunk_bytes(size_t(gpu.memory_bytes));
      gpt2_declare(model, config, options);
      const int64_t tokens = int64_t(c.B) * c.T;
      columns.push_back({gpu, wiring, modelled_step(gpu, model, segments),
                         flops_per_token(config, model.attention_plan, c.T, segments) * double(tokens), tokens,
                         kv_bytes_per_token(config, model.attention_plan, sizeof(floatX))});
    }
  return columns;
}

// ----------------------------------------------------------------------------
// Tables

struct RowKey {
  std::string operation, part;
  bool operator==(const RowKey& o) const { return operation == o.operation && part == o.part; }
  std::string text() const { return operation == part || part == "matmul" ? operation : operation + ": " + part; }
};

struct RowSum {
  int calls = 0;
  double seconds = 0;
  const char* bound = "";
};

// Calls visit(RowKey, ModelledPart) for each part of a step.
template <class Visit>
void for_each_part(const Column& column, Visit visit) {
  for (const ModelledOperation& operation : column.step)
    for (const ModelledPart& part : operation.parts) visit(RowKey{operation.name, part.name}, part);
}

std::vector<RowKey> rows_of(const std::vector<Column>& columns) {
  std::vector<RowKey> rows;
  for (const Column& column : columns)
    for_each_part(column, [&](const RowKey& key, const ModelledPart&) {
      if (std::find(rows.begin(), rows.end(), key) == rows.end()) rows.push_back(key);
    });
  return rows;
}

RowSum sum_of(const Column& column, const RowKey& row) {
  RowSum sum;
  for_each_part(column, [&](const RowKey& key, const ModelledPart& part) {
    if (key == row) sum.calls++, sum.seconds += part.seconds, sum.bound = part.bound;
  });
  return sum;
}

void print_header(const std::vector<Column>& columns, const char* first, const char* alignment) {
  printf("%s", first);
  for (const Column& column : columns) printf(" %s, %s |", column.gpu.name.c_str(), column.wiring.c_str());
  printf("\n%s", alignment);
  for (size_t i = 0; i < columns.size(); i++) printf(" --: |");
  printf("\n");
}

template <class Value>
void print_row(const std::vector<Column>& columns, const char* name, Value value) {
  printf("| %s | | |", name);
  for (const Column& column : columns) printf(" %s |", value(column).c_str());
  printf("\n");
}

// Milliseconds by operation, and their sum.
void print_step(const std::vector<Column>& columns) {
  print_header(columns, "| operation, ms a step | calls | bound by |", "| --- | --: | --- |");
  for (const RowKey& row : rows_of(columns)) {
    const RowSum first = sum_of(columns[0], row);
    printf("| %s | %d | %s |", row.text().c_str(), first.calls, first.bound);
    for (const Column& column : columns) printf(" %.3f |", sum_of(column, row).seconds * 1e3);
    printf("\n");
  }
  print_row(columns, "**sum**", [](const Column& c) { return format("**%.1f**", c.seconds() * 1e3); });
  print_row(columns, "tokens/s", [](const Column& c) { return thousands(int64_t(c.tokens_per_second())); });
  print_row(columns, "share of peak",
            [](const Column& c) { return format("%.0f %%", 100 * c.flops / c.seconds() / c.gpu.peak_flops); });
  const auto sum_where = [](const Column& c, auto predicate) {
    double sum = 0;
    for_each_part(c, [&](const RowKey&, const ModelledPart& part) {
      if (predicate(part)) sum += part.seconds;
    });
    return format("%.1f", sum * 1e3);
  };
  print_row(columns, "of it: matmuls", [](const Column& c) { return format("%.1f", matmul_seconds(c) * 1e3); });
  print_row(columns, "of it: attention", [&](const Column& c) {
    return sum_where(c, [](const ModelledPart& p) { return p.tiles.m == 0 && p.flops > 0; });
  });
  print_row(columns, "of it: the rest",
            [&](const Column& c) { return sum_where(c, [](const ModelledPart& p) { return p.flops == 0; }); });
  print_row(columns, "of it: between kernels", [](const Column& c) {
    int kernels = 0;
    for_each_part(c, [&](const RowKey&, const ModelledPart& part) { kernels += part.kernels; });
    return format("%.1f (%d kernels)", kernels * seconds_between_kernels * 1e3, kernels);
  });
}

// Tiles and waves of the matmuls, by shape.
void print_matmuls(const std::vector<Column>& columns) {
  printf("\n### Matmuls, %s\n\n", columns[0].wiring.c_str());
  printf("| matmul | m x n x k | GPU | tile | parts along k | tiles | waves | us | TFLOP/s |\n| --- | --- | --- | --- "
         "| --: | --: | --: | --: | --: |\n");
  for (const Column& column : columns) {
    if (column.wiring != columns[0].wiring) continue;
    std::vector<std::string> seen;
    for_each_part(column, [&](const RowKey& key, const ModelledPart& part) {
      const MatmulTiles& t = part.tiles;
      const std::string shape = format("| %s | %s x %s x %s |", key.text().c_str(), thousands(t.m).c_str(),
                                       thousands(t.n).c_str(), thousands(t.k).c_str());
      if (t.m == 0 || std::find(seen.begin(), seen.end(), shape) != seen.end()) return;
      seen.push_back(shape);
      printf("%s %s | %d x %d | %d | %lld | %lld | %.1f | %.0f |\n", shape.c_str(), column.gpu.name.c_str(), t.rows,
             t.columns, t.splits, (long long)t.tiles, (long long)t.waves, part.seconds * 1e6,
             part.flops / part.seconds * 1e-12);
    });
  }
}

// The seconds that the operations with these names take in a step.
double seconds_of(const Column& column, const std::vector<std::string>& names) {
  double sum = 0;
  for (const ModelledOperation& operation : column.step)
    if (std::find(names.begin(), names.end(), operation.name) != names.end()) sum += operation.seconds();
  return sum;
}

// What each wiring costs beside the first: a step, and within it attention and the sums over what several layers have
// projected or put out.
void print_wirings(const Case& c) {
  const std::vector<Column> columns = columns_of(c, {h100_sxm()});
  printf("\n| %s, %d x %s tokens, %s | ms a step | / %s | of it matmuls | attention | sums over layers | K/V bytes per "
         "token | FLOPs / %s |\n"
         "| --- | --: | --: | --: | --: | --: | --: | --: |\n",
         c.model.c_str(), c.B, thousands(c.T).c_str(), columns[0].gpu.name.c_str(), columns[0].wiring.c_str(),
         columns[0].wiring.c_str());
  for (const Column& column : columns)
    printf("| %s | %.1f | %.3f | %.1f | %.1f | %.2f | %s | %.3f |\n", column.wiring.c_str(), column.seconds() * 1e3,
           column.seconds() / columns[0].seconds(), matmul_seconds(column) * 1e3,
           seconds_of(column, attention_operations) * 1e3, seconds_of(column, layer_sums) * 1e3,
           thousands(column.kv_bytes).c_str(), column.flops / columns[0].flops);
}

// Attention within documents of as many tokens, which begin anywhere, beside plain attention.
void print_documents(Case c) {
  printf("\n| d12, tokens | documents of | forward, ms a step | backward, ms | attention / plain's | pairs / plain's | "
         "ms a step |\n| --- | --: | --: | --: | --: | --: | --: |\n");
  for (const auto& [B, T] : {std::pair(4, 4096), {1, 16384}}) {
    c.B = B, c.T = T;
    Column plain;
    for (const int length : {INT_MAX, 256, 1024, 16384}) {
      c.documents = length, c.wirings = {length == INT_MAX ? "plain" : "documents"};
      const Column column = columns_of(c, {h100_sxm()})[0];
      if (length == INT_MAX) plain = column;
      const auto seconds = [](const Column& x) { return seconds_of(x, attention_operations); };
      const auto flops = [](const Column& x) {
        double sum = 0;
        for_each_part(x, [&](const RowKey&, const ModelledPart& part) { sum += part.tiles.m > 0 ? 0 : part.flops; });
        return sum;
      };
      printf("| %d x %s | %s | %.3f | %.3f | %.3f | %.3f | %.1f |\n", B, thousands(T).c_str(),
             length == INT_MAX ? "plain" : thousands(length).c_str(), seconds_of(column, {"attention_forward"}) * 1e3,
             seconds_of(column, {"attention_backward"}) * 1e3, seconds(column) / seconds(plain),
             flops(column) / flops(plain), column.seconds() * 1e3);
    }
  }
}

// A T4 in fp16: 8 layers of 256 channels, with what Muon multiplies, and GPT-2 124M.
void print_in_fp16() {
  const GpuSpec gpu = t4();
  printf("\n## A T4, in fp16\n\nA T4 is assumed to reach %.0f TFLOP/s in matmuls and %.0f GB/s in copies, of the data "
         "sheet's 65 and 320. Guesses are that attention\nis to matmuls as on an A100, and that Muon's products reach "
         "half the rate of matmuls.\n\n"
         "| GPU | model | tokens per update | ms | of it matmuls | attention | Muon | the rest | tokens/s |\n"
         "| --- | --- | --: | --: | --: | --: | --: | --: | --: |\n",
         gpu.peak_flops * gpu.matmul_share * 1e-12, gpu.bandwidth * gpu.copy_share * 1e-9);
  for (const bool is_small : {true, false}) {
    Case c;
    c.model = is_small ? small : "d12", c.B = is_small ? 4 : 8, c.T = is_small ? 256 : 1024;
    const Column column = columns_of(c, {gpu})[0];
    double muon = 0;
    if (is_small) {
      GPT2 model;
      PlanOptions options = {c.B, c.T};
      options.muon = true;
      gpt2_declare(model, small_model(), options);
      muon = 2 * cost_beside_model(model, 1).flops / (gpu.peak_flops * gpu.matmul_share);
    }
    const double seconds = column.seconds() + muon, matmuls = matmul_seconds(column),
                 attention = seconds_of(column, attention_operations);
    printf("| %s | %s, %s | %d x %s | %.1f | %.1f | %.1f | %.1f | %.1f | %s |\n", gpu.name.c_str(),
           is_small ? small.c_str() : "GPT-2 124M", column.wiring.c_str(), c.B, thousands(c.T).c_str(), seconds * 1e3,
           matmuls * 1e3, attention * 1e3, muon * 1e3, (seconds - muon - matmuls - attention) * 1e3,
           thousands(int64_t(double(column.tokens) / seconds)).c_str());
  }
}

void print_case(const Case& c) {
  const std::vector<Column> columns = columns_of(c);
  printf("\n## %s, %d x %s tokens%s\n\n", c.model.c_str(), c.B, thousands(c.T).c_str(),
         c.recompute > 0 ? format(", -r %d", c.recompute).c_str() : "");
  print_step(columns);
}

// ----------------------------------------------------------------------------
// The page

void print_assumptions() {
  printf("\n## What is assumed\n\n| | H100 SXM | A100 SXM 80 GB | from |\n| --- | --: | --: | --- |\n");
  const GpuSpec gpus[] = {h100_sxm(), a100_sxm()};
  const auto row = [&](const char* what, const char* unit, double scale, double GpuSpec::*field, const char* source) {
    printf("| %s |", what);
    for (const GpuSpec& gpu : gpus) printf(" %.4g %s |", gpu.*field * scale, unit);
    printf(" %s |\n", source);
  };
  printf("| multiprocessors | %d | %d | NVIDIA's data sheets |\n", gpus[0].multiprocessors, gpus[1].multiprocessors);
  row("dense bf16", "TFLOP/s", 1e-12, &GpuSpec::peak_flops, "NVIDIA's data sheets");
  row("clock for that", "GHz", 1e-9, &GpuSpec::clock, "multiprocessors x 4,096 (A100: 2,048) FLOP x clock");
  row("memory", "GB", 1e-9, &GpuSpec::memory_bytes, "NVIDIA's data sheets");
  row("its bandwidth", "TB/s", 1e-12, &GpuSpec::bandwidth, "NVIDIA's data sheets");
  row("of dense bf16, in a wave of 128 x 256 tiles", "", 1, &GpuSpec::matmul_share,
      "an assumption: for cuBLAS and matrices of 8,192, rates of about 720 TFLOP/s are reported on an H100 and of 260 "
      "to 270 on an A100");
  row("of the bandwidth, when much is read and written", "", 1, &GpuSpec::copy_share,
      "an assumption: device-to-device copies are reported at 88 to 93 %");
  const auto rates = [&](const char* what, AttentionRate GpuSpec::*field) {
    for (int i = 0; i < 3; i++) {
      const char* names[] = {"limit for long sequences", "overhead", "ours / FlashAttention-2"};
      printf("| %s: %s |", what, names[i]);
      for (const GpuSpec& gpu : gpus) {
        const AttentionRate& r = gpu.*field;
        printf(" %s |", (i == 0   ? format("%.0f TFLOP/s", r.limit * 1e-12)
                         : i == 1 ? format("%.0f keys", r.overhead)
                                  : format("%.2f", r.ratio))
                            .c_str());
      }
      printf(" %s |\n", i == 2 ? "machine code, replayed on a model of a multiprocessor" : "see below");
    }
  };
  rates("attention forward, 64 channels", &GpuSpec::forward64);
  rates("attention backward, 64 channels", &GpuSpec::backward64);
  rates("attention forward, 128 channels", &GpuSpec::forward128);
  rates("attention backward, 128 channels", &GpuSpec::backward128);
  printf("| between two kernels of a graph | %.1f us | %.1f us | an assumption |\n", seconds_between_kernels * 1e6,
         seconds_between_kernels * 1e6);
  using Counts = InstructionCounts;
  printf("\nA matmul takes the fastest of the tilings that cuBLASLt's kernels have, in whole waves of one tile a "
         "multiprocessor; a tile costs as\n"
         "much as %.0f more k for its first loads and its end; smaller tiles than 128 x 256 reach 0.9, 0.75 or 0.6 of "
         "that one's rate; up to %d parts\n"
         "along k are written in fp32 and added up. These are assumptions, too. Other kernels take what their bytes or "
         "their instructions take,\n"
         "whichever is more. A thread issues so many for eight elements, counted in the machine code for sm_90: GELU "
         "%.0f and %.0f in the\n"
         "backward pass, LayerNorm %.0f and %.0f, the classifier %.0f, AdamW %.0f.\n",
         matmul_tile_overhead, most_matmul_splits, Counts::gelu_forward, Counts::gelu_backward,
         Counts::layernorm_forward, Counts::layernorm_backward, Counts::classifier, Counts::adamw);
}

// FlashAttention-2's published rates beside the formula's.
void print_attention_fit() {
  printf("\n### Attention\n\n"
         "A query that sees n keys is computed at `limit * n / (n + overhead)`. Limit and overhead are chosen so that "
         "this gives the rates\n"
         "that were published for FlashAttention-2 with a causal mask, in TFLOP/s: forward on an H100 in the paper of "
         "FlashAttention-3 (Shah et\n"
         "al. 2024, figure 5), forward and backward on an A100 in its own (Dao 2023, figure 4).\n"
         "The backward pass on an H100 was published without a mask only (with 64 channels 198, 238 and 264 TFLOP/s at "
         "T 512, 1,024 and\n"
         "2,048; with 128 channels 214 at 512 and 322 at 16,384). From what fits those the limit is taken 5 %% lower "
         "and the overhead 90 to 100\n"
         "keys higher, which is what the mask does to the forward pass. Our rate is that times the ratio of our "
         "machine code's to\n"
         "FlashAttention-2's on a model of a multiprocessor, which is good to 7 to 10 %%.\n\n"
         "| T | 512 | 1,024 | 2,048 | 4,096 | 8,192 | 16,384 |\n| --- | --: | --: | --: | --: | --: | --: |\n");
  const GpuSpec h100 = h100_sxm(), a100 = a100_sxm();
  const auto row = [](const char* what, const std::vector<double>& published, auto rate) {
    printf("| %s: published / formula |", what);
    int T = 512;
    for (double p : published) printf(" %.0f / %.0f |", p, rate(T / 2.0) * 1e-12), T *= 2;
    printf("\n");
  };
  const auto forward = [](const AttentionRate& r) {
    return [&r](double keys) { return flash_attention_rate(r, keys); };
  };
  const auto both = [](const AttentionRate& f, const AttentionRate& b) {
    return [&](double keys) { return 3.5 / (1 / flash_attention_rate(f, keys) + 2.5 / flash_attention_rate(b, keys)); };
  };
  row("H100, forward, 64 channels", {180, 229, 262, 284, 295, 299}, forward(h100.forward64));
  row("H100, forward, 128 channels", {191, 260, 298, 319, 333, 335}, forward(h100.forward128));
  row("A100, forward and backward, 64 channels", {88, 119, 140, 156, 165, 171}, both(a100.forward64, a100.backward64));
  row("A100, forward and backward, 128 channels", {99, 133, 155, 173, 182, 189},
      both(a100.forward128, a100.backward128));
}

// What a step would take if an assumption were worse.
void print_sensitivity(const std::vector<Case>& cases) {
  struct Change {
    const char* what;
    void (*apply)(GpuSpec&);
  };
  const Change changes[] = {{"as assumed", [](GpuSpec&) {}},
                            {"matmuls at 0.9 of the assumed rate", [](GpuSpec& g) { g.matmul_share *= 0.9; }},
                            {"bandwidth at 0.9 of the assumed", [](GpuSpec& g) { g.copy_share *= 0.9; }},
                            {"attention at 0.9 of the assumed rate",
                             [](GpuSpec& g) {
                               for (AttentionRate* r : {&g.forward64, &g.backward64, &g.forward128, &g.backward128})
                                 r->ratio *= 0.9;
                             }},
                            {"attention as fast as FlashAttention-2", [](GpuSpec& g) {
                               for (AttentionRate* r : {&g.forward64, &g.backward64, &g.forward128, &g.backward128})
                                 r->ratio = 1;
                             }}};
  printf("\n## If an assumption is wrong\n\n| ms a step, %s |", default_wiring(12, 12).text.c_str());
  for (const Case& c : cases)
    printf(" H100, %d x %s | A100, %d x %s |", c.B, thousands(c.T).c_str(), c.B, thousands(c.T).c_str());
  printf("\n| --- |");
  for (size_t i = 0; i < cases.size(); i++) printf(" --: | --: |");
  printf("\n");
  for (const Change& change : changes) {
    std::vector<GpuSpec> gpus = {h100_sxm(), a100_sxm()};
    for (GpuSpec& gpu : gpus) change.apply(gpu);
    printf("| %s |", change.what);
    for (Case c : cases) {
      c.wirings = {default_wiring(12, 12).text};
      for (const Column& column : columns_of(c, gpus)) printf(" %.1f |", column.seconds() * 1e3);
    }
    printf("\n");
  }
}

void print_page() {
  Case short_sequences, long_sequence;
  long_sequence.B = 1, long_sequence.T = 16384;
  const Column short_column = columns_of(short_sequences, {h100_sxm()})[0],
               long_column = columns_of(long_sequence, {h100_sxm()})[0];
  // by_hand: the estimate by hand for the short sequences, in ms.
  const double by_hand = 40, ms = short_column.seconds() * 1e3, matmuls = matmul_seconds(short_column) * 1e3;
  printf("# How long a step should take on a GPU\n\n"
         "Estimates, made before any GPU had run the trainer; what an H100 and an H200 took is on [another "
         "page](results/hopper/README.md).\n"
         "`make gpu-model` writes this page from the trainer's own plan (`dev/bench/gpu_model.h`); `make gpu-check` "
         "prints what it measures\n"
         "beside the same figures. Weights and activations in %s.\n\n"
         "On an H100 a step of 16 x 1,024 tokens takes %.0f ms and one of 1 x 16,384 takes %.0f ms. Estimates by hand "
         "had been %.0f and 100 ms;\n"
         "the former comes out here if matmuls reach %.2f of peak within a wave, and not the %.2f that is assumed. "
         "llm.c's record run took\n"
         "35.4 ms, for plain GPT-2 with cuDNN's attention. The page is no more exact than its assumptions; the table "
         "after the matmuls shows what\n"
         "each of them is worth.\n",
         precision_name, ms, long_column.seconds() * 1e3, by_hand,
         h100_sxm().matmul_share * matmuls / (matmuls + by_hand - ms), h100_sxm().matmul_share);
  print_case(short_sequences);
  print_case(long_sequence);
  print_matmuls(columns_of(short_sequences));
  print_in_fp16();
  printf("\n## Within documents\n\nWith `documents` a query sees its own document alone. Documents begin anywhere in "
         "the kernels' tiles, which costs a query %.0f keys\nforward and %.0f backward. Those that are longer than a "
         "row are as plain attention.\n",
         KeysBesideDocuments::forward, KeysBesideDocuments::backward);
  print_documents(Case());
  printf("\n## What a layer uses of other layers\n");
  Case by_wiring;
  by_wiring.wirings = wirings_of_sources;
  print_wirings(by_wiring);
  print_sensitivity({short_sequences, long_sequence});
  print_assumptions();
  print_attention_fit();
}

// ----------------------------------------------------------------------------
// The page of GPUs

struct ListedGpu {
  GpuSpec spec;
  double flops;  // dense, of a multiprocessor in a cycle
  int l2_mb;     // not modelled
  const char* source;

  bool is_t4() const { return spec.name == "T4"; }
};

std::vector<ListedGpu> listed_gpus() {
  // A GeForce card multiplies at half the rate where sums are in fp32.
  const double half = 512, full = 1024;
  return {
      {by_data_sheet("RTX 3060", 28, 1.777e9, half, 360e9, 12e9), half, 3, "sysrqmts.com"},
      {by_data_sheet("RTX 3090", 82, 1.695e9, half, 936e9, 24e9), half, 6,
       "holynerdvana.blogspot.com, after Tom's Hardware; half of its 142 TFLOP/s"},
      {by_data_sheet("RTX 4070", 46, 2.475e9, half, 504e9, 12e9), half, 36, "thefpsreview.com; L2: fpsbench.com"},
      {by_data_sheet("RTX 4090", 128, 2.52e9, half, 1008e9, 24e9), half, 72,
       "hmc-tech.com, with 165.2 TFLOP/s of bf16 where sums are in fp32 and twice that in fp16"},
      {by_data_sheet("RTX 5090", 170, 2.407e9, half, 1792e9, 32e9), half, 96,
       "fpsbench.com; a quarter of the 838 TFLOP/s of fp16, sparse, that spheron.network has"},
      {by_data_sheet("GB10", 48, 2.52e9, full, 273e9, 128e9), full, 24,
       "ai-infrastructure.net; its clock from 31 TFLOP/s of fp32. That sums in fp32 do not halve the rate is a guess: "
       "a user measured 188 TFLOP/s in fp8 (forums.developer.nvidia.com). L2 by memory. The CPU's memory is the same"},
      {t4(), full, 4,
       "sysrqmts.com; memory as the driver shows it: chiemon.github.io. In fp16, for it has no bf16: PRECISION=FP16. "
       "[Assumed](gpu-model.md#a-t4-in-fp16) are 40 TFLOP/s in matmuls and 225 GB/s in copies"},
      {a100_sxm(), 2048, 40, "NVIDIA's data sheet, by memory; L2: sysrqmts.com"},
      {by_data_sheet("L40S", 142, 2.49e9, full, 864e9, 48e9), full, 96,
       "NVIDIA's data sheet as mullet.se has it: 362 TFLOP/s; L2 by memory"},
      {h100_sxm(), 4096, 50, "NVIDIA's data sheet, by memory"},
      {h200_sxm(), 4096, 50, "NVIDIA's data sheet, by memory"},
      {b200(), 8192, 126,
       "glennklockwood.com, chipsandcheese.com; L2: besthub.dev; memory of DGX B200, by memory. Attention as an H100's "
       "by mma"},
  };
}

// Tokens/s of whole updates of GPT-2 124M.
struct Measurement {
  GpuSpec gpu;
  int B, T;
  char wiring[32];
  double measured, modelled;
};

// From the reports' tables of updates, those of the page's lengths whose wirings have no kernels for masks.
std::vector<Measurement> read_measurements() {
  std::vector<Measurement> list;
  for (const auto& [gpu, name] : {std::pair(h100_sxm(), "h100-before"), {h200_sxm(), "nvidia-h200"}}) {
    std::istringstream lines(read_whole_file(format("dev/bench/results/hopper/%s.md", name)));  // from the root
    for (std::string line; std::getline(lines, line);) {
      Measurement m = {gpu, 0, 0, "", 0, 0};
      if (sscanf(line.c_str(), "| %d | %d | %31[^ ] | %*f | %lf |", &m.B, &m.T, m.wiring, &m.measured) != 4) continue;
      Case c;
      c.B = m.B, c.T = m.T, c.wirings = {m.wiring};
      if (m.T > 4096 || (c.wirings[0] != "plain" && c.wirings[0] != "sla(9,9)" && c.wirings[0] != "gqa(4)")) continue;
      m.modelled = columns_of(c, {gpu})[0].tokens_per_second();
      list.push_back(m);
    }
  }
  return list;
}

// Measured over modelled rate of updates with this length, the geometric mean over all GPUs but `left_out`.
double correction(const std::vector<Measurement>& measurements, int T, const std::string& left_out = "") {
  double sum = 0, count = 0;
  for (const Measurement& m : measurements)
    if (m.T == T && m.gpu.name != left_out) sum += std::log(m.measured / m.modelled), count++;
  return std::exp(sum / count);
}

// "| micro-batch | tokens/s | hours |" of one model on a GPU. The micro-batch that is timed has at most as many tokens
// as the measured ones.
void print_largest(const GpuSpec& gpu, const char* preset, int T, const std::vector<Measurement>& measurements) {
  ModelConfig config;
  CHECK(config_from_preset(preset, config));
  config.max_seq_len = T;
  Case c;
  int largest = 0;
  for (c.recompute = -1; largest == 0 && c.recompute < int(Recompute::chunks);)
    largest = largest_batch_on(size_t(gpu.memory_bytes), config, T, Recompute(++c.recompute));
  if (largest == 0) return (void)printf(" - | | |");
  c.model = preset, c.B = std::min(largest, 32768 / T), c.T = T, c.wirings = {config.wiring.text};
  double rate = columns_of(c, {gpu})[0].tokens_per_second() * correction(measurements, T);
  const char* bold = "";
  for (const Measurement& m : measurements)
    if (m.gpu.name == gpu.name && c.model == "d12" && m.B == c.B && m.T == T && m.wiring == config.wiring.text)
      rate = m.measured, bold = "**";
  const double digits = *bold ? 1 : std::pow(10, std::floor(std::log10(rate)) - 2);  // three of what is modelled
  printf(" %s%s | %s%s%s | %s%.3g%s |", thousands(largest).c_str(),
         c.recompute > 0 ? format(", `-r %d`", c.recompute).c_str() : "", bold,
         thousands(int64_t(std::round(rate / digits) * digits)).c_str(), bold, bold, 1e10 / rate / 3600, bold);
}

void print_errors(const std::vector<Measurement>& measurements) {
  printf("\n## Measured beside modelled\n\nGPT-2 124M. The last column: the model's error on this GPU "
         "with the other GPU's correction alone.\n\n"
         "| GPU | B x T | wiring | tokens/s | modelled | measured / modelled | error |\n"
         "| --- | --- | --- | --: | --: | --: | --: |\n");
  double sum = 0, most = 0;
  for (const Measurement& m : measurements) {
    const double error = m.modelled * correction(measurements, m.T, m.gpu.name) / m.measured - 1;
    sum += std::fabs(error), most = std::max(most, std::fabs(error));
    printf("| %s | %d x %s | %s | %s | %s | %.3f | %+.1f %% |\n", m.gpu.name.c_str(), m.B, thousands(m.T).c_str(),
           m.wiring, thousands(int64_t(m.measured)).c_str(), thousands(int64_t(m.modelled)).c_str(),
           m.measured / m.modelled, 100 * error);
  }
  printf("\nThat error is %.1f %% in the mean and at most %.1f %%: between two GPUs with one processor and one model "
         "of 124M, which says nothing\nof larger models and little of other GPUs. The corrections, over both GPUs: "
         "%.3f at 1,024 tokens and %.3f at 4,096. Since then another H200\nhas made 555,500 to 571,000 tokens/s at "
         "32 x 1,024.\n",
         100 * sum / double(measurements.size()), 100 * most, correction(measurements, 1024),
         correction(measurements, 4096));
}

void print_gpus() {
  const std::vector<Measurement> measurements = read_measurements();
  printf("# GPUs: what fits, and how fast it should train\n\n"
         "GPT-2 with skip-layer attention, in %s, one GPU, AdamW. **Bold: measured**, in one run each ([H100 and "
         "H200](results/hopper/README.md), the H100\nbefore changes that made the H200 faster); all else is modelled, "
         "and of no other kind has a GPU been measured.\n`make gpu-model` writes this page.\n\n"
         "The micro-batch is the largest that fits by the trainer's own plan, as on [another page](results/memory.md), "
         "with GB of 10^9 bytes: the 7 %%\nthat as many GiB have more are left for CUDA's context and a display. It "
         "recomputes nothing unless an `-r` says so, the lowest that fits.\ntokens/s is of that "
         "micro-batch, or "
         "of 32,768 tokens if it has more, by [the model](gpu-model.md) times the ratio of measured to modelled\n"
         "on H100 and H200, which other GPUs are only assumed to have. Hours are for 10 billion tokens.\n",
         precision_name);
  for (const int T : {1024, 4096}) {
    printf("\n## %s tokens\n\n"
           "| GPU | 124M: micro-batch | tokens/s | hours | 350M: micro-batch | tokens/s | hours | 774M: micro-batch | "
           "tokens/s | hours |\n"
           "| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: |\n",
           thousands(T).c_str());
    for (const ListedGpu& gpu : listed_gpus()) {
      printf("| %s%s |", gpu.spec.name.c_str(), gpu.is_t4() ? ", in fp16" : "");
      for (const char* preset : {"d12", "d24", "d36"}) print_largest(gpu.spec, preset, T, measurements);
      printf("\n");
    }
  }
  print_errors(measurements);
  printf("\n## The GPUs\n\n"
         "Dense TFLOP/s in bf16 with sums in fp32 are multiprocessors x boost clock x FLOP a cycle. Figures are from "
         "the pages named,\nor from memory; NVIDIA's documents were not opened. Matmuls, copies and attention reach "
         "the shares that are\n[assumed](gpu-model.md#what-is-assumed) on an A100, or on an H100, "
         "H200 and B200. Power limits and L2 are not modelled.\n\n"
         "| GPU | SMs | GHz | dense TFLOP/s | memory, GB | GB/s | L2, MB | from |\n"
         "| --- | --: | --: | --: | --: | --: | --: | --- |\n");
  for (const ListedGpu& gpu : listed_gpus()) {
    const GpuSpec& s = gpu.spec;
    printf("| %s | %d | %.2f | %.1f | %.0f | %s | %d | %s |\n", s.name.c_str(), s.multiprocessors, s.clock * 1e-9,
           s.multiprocessors * s.clock * gpu.flops * 1e-12, s.memory_bytes * 1e-9,
           thousands(int64_t(gpu.is_t4() ? 320 : std::round(s.bandwidth * 1e-9))).c_str(), gpu.l2_mb, gpu.source);
  }
}

int main(int argc, char** argv) {
  CLI::App app("How long a training step should take on an H100 and an A100, by operation; without options "
               "dev/bench/gpu-model.md");
  Case c;
  app.add_option("--model", c.model, "a preset: d12, d24, d36, d48, gpt3:768 and so on")->capture_default_str();
  app.add_option("--wiring", c.wirings, "more than once for more than one; the model's own and plain");
  app.add_option("-b", c.B, "sequences in the micro-batch")->capture_default_str()->check(CLI::PositiveNumber);
  app.add_option("-t", c.T, "their length")->capture_default_str()->check(CLI::PositiveNumber);
  app.add_option("-r", c.recompute, "level of recomputation")->capture_default_str()->check(CLI::Range(0, 4));
  app.add_option("--documents", c.documents,
                 "with the term documents: tokens in one; default: as many as in a sequence")
      ->check(CLI::PositiveNumber);
  bool by_wiring = false, gpus = false;
  app.add_flag("--by-wiring", by_wiring, "a row for each wiring, on an H100, beside the first");
  app.add_flag("--gpus", gpus, "dev/bench/gpus.md: what fits on twelve GPUs, and how fast it should train");
  CLI11_PARSE(app, argc, argv);
  try {
    if (argc == 1) print_page();
    else if (gpus) print_gpus();
    else if (by_wiring) print_wirings(c);
    else print_case(c), print_matmuls(columns_of(c));
    return 0;
  } catch (const UserError& e) {
    fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
