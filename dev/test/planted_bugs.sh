#!/usr/bin/env bash
# Can the tests fail? Plants one bug after another in a copy of the tree, builds the test that should notice and runs it: it must
# fail. `make planted-bugs`, about twenty minutes on two cores; an argument picks the bugs whose line matches it.
set -euo pipefail
cd "$(dirname "$0")/../.."
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -co --exclude-standard -z | xargs -0 cp --parents -p -t "$copy"
cd "$copy"
compile() { make -s OPTIMIZE='-O1 -march=native -ffp-contract=fast' "$@"; }  # quick to build is what counts here

# file | what is there | what is planted | test program | tests that must notice
bugs() {
  cat <<'END'
llmc/kv_plan.h|l >= c.num_skip_layer;|l > c.num_skip_layer;|test_plan|KVPlan.IsTheDesigns*
llmc/kv_plan.h|i >= c.num_heads - c.num_skip_head|i >= c.num_heads - c.num_skip_layer|test_plan|KVPlan.IsTheDesigns*
llmc/kv_plan.h|* num_heads + head] > l}|* num_heads + head] >= l}|test_plan|KVPlan.*
llmc/kv_plan.h|busy[slab] = 1;|busy[slab] = 0;|test_plan|KVPlan.IsTheDesigns*
llmc/kv_plan.h|busy[plan.slab[l]] = 0;|busy[plan.slab[l]] = 1;|test_gpt2_sla_cpu|Memory.Overlapping*
llmc/kv_plan.h|plan.projected[l].push_back(i);|{ if (highest_reader[l * num_heads + i] >= 0) plan.projected[l].push_back(i); }|test_plan|KVPlan.KeepsDead*
llmc/kv_plan.h|%d of %d"|%d of %d."|test_plan|KVPlan.IsDrawn*
llmc/config.h|{36, 20, 1280}|{36, 16, 1280}|test_plan|Config.Presets*
llmc/config.h|c.num_skip_layer < 1|c.num_skip_layer < 0|test_plan|Config.Refuses*
llmc/arena.h|+ alignment - 1) / alignment * alignment|)|test_plan|Arena.*
llmc/random.h|round < 10|round < 9|test_plan|Random.IsPhilox*
llmc/random.h|-2.0 * std::log|-1.9 * std::log|test_plan|Random.Normals*
llmc/schedule.h|double(step) / double(warmup_steps)|double(step - 1) / double(warmup_steps)|test_plan|Schedule.*
llmc/schedule.h|total_steps / 5|total_steps / 4|test_plan|Schedule.*
llmc/sampler.h|threshold < cumulative|threshold > cumulative|test_plan|Sampler.*
llmc/sampler.h|max) / temperature);\n  double|max));\n  double|test_plan|Sampler.Sharpens*
llmc/parameters.h|int64_t part = (row - C) / kv|int64_t part = 0 * (row - C) / kv|test_files|Parameters.*
llmc/model_io.cpp|std::fill(full, full + num_elements(model.table.specs[size_t(index)].file_shape), 0.0f);||test_files|Parameters.*
llmc/model_io.cpp|if (zero_biases)|if (false)|test_files|ModelOnDisk.WithoutBiases*
llmc/model_io.cpp|if (tensor->shape != shape)|if (false)|test_files|ModelOnDisk.Refuses*
llmc/model_io.cpp|if (!is_mask(name)) user_error|if (false) user_error|test_files|ModelOnDisk.Refuses*
llmc/model_io.cpp|if (row != wte_row)|if (false)|test_files|ModelOnDisk.Refuses*
llmc/config_json.cpp|{"layer_norm_epsilon", c.layer_norm_eps},||test_files|ConfigJson.ComesBack*
llmc/config_json.cpp|act != "gelu_new"|act == "gelu_new"|test_files|ConfigJson.OfPlain*
llmc/checkpoint.cpp|if (step > newest_step|if (step != newest_step|test_files|Checkpoint.*
llmc/logger.cpp|if (j.value("step", int64_t(0)) <= step)|if (true)|test_files|Log.OfAnEarlier*
llmc/logger.cpp|while (fs::exists(out + format("/log.%d.jsonl", n))) n++;|while (n < 2) n++;|test_files|Log.OfAnEarlier*
llmc/options.cpp|if (line.size() < 3 |if (true |test_files|Options.Written*
llmc/options.cpp|resume == "1"|resume != "1"|test_files|Options.Resume*
llmc/options.cpp|at_least("-b", o.micro_batch, 1);||test_files|Options.ThatMake*
llmc/cpu/vec.h|1.42860677e-6f|1.43860677e-6f|test_ops|Exp.*
llmc/cpu/matmul.h|bias != nullptr ? 1.0f : 0.0f|0.0f|test_ops|Matmul.Forward*
llmc/cpu/matmul.h|inp, C, 1.0f, dweight|inp, C, 0.0f, dweight|test_ops|Matmul.Backward*
llmc/cpu/matmul.h|dbias[first + j] += sum[j]|dbias[j] += sum[j]|test_ops|Matmul.Backward*
llmc/cpu/layernorm.h|- mean_g - xhat|- xhat|test_ops|LayerNorm.*
llmc/cpu/layernorm.h|for (int64_t block = 0; block < blocks; block++) {\n      const|for (int64_t block = 0; block < 1; block++) {\n      const|test_ops|LayerNorm.*
llmc/cpu/gelu.h|float du = gelu_scale * (1.0f + 3.0f|float du = gelu_scale * (1.0f + 2.0f|test_ops|Gelu.*
llmc/cpu/classifier.h|row[targets[n]] -= dloss;|row[targets[n]] -= 1;|test_ops|Classifier.*
llmc/cpu/classifier.h|vec_exp(row[i] - max);\n        row|vec_exp(row[i]);\n        row|test_ops|Classifier.*
llmc/cpu/embedding.h|(first_position + t) * C|t * C|test_ops|Embedding.*
llmc/cpu/embedding.h|token[i] += row[i]|token[i] = row[i]|test_ops|Embedding.*
llmc/cpu/optimizer.h|* v_scale + s.eps|* v_scale|test_gpt2_sla_cpu|Bits.AreTheSame*:DeadRows.DoNot*:Golden*
llmc/cpu/optimizer.h|params[i] * keep|params[i]|test_ops|AdamW.*
llmc/cpu/optimizer.h|double sum = 0;\n#pragma|float sum = 0;\n#pragma|test_ops|SumOfSquares.*
llmc/cpu/attention.h|q0 + r + 1 - k0);\n      float max|q0 + r + 2 - k0);\n      float max|test_ops|Attention.OfSeveral*
llmc/cpu/attention.h|o[i] *= rescale|o[i] *= 1.0f|test_ops|Attention.OfSeveral*
llmc/cpu/attention.h|sum += row_sum[r] * rescale|sum += row_sum[r]|test_ops|Attention.OfSeveral*
llmc/cpu/attention.h|(dsr[j] - row_delta) * scale|(dsr[j] - row_delta)|test_ops|Attention.TakesAny*
llmc/cpu/attention.h|view.k + b * a.T * view.stride|view.k|test_ops|Attention.Shares*
llmc/cpu/attention.h|if (!view.accumulate)|if (view.accumulate)|test_ops|Attention.Shares*
llmc/cpu/attention.h|row_max[r] = max;|row_max[r] = 0;|test_ops|Attention.StaysFinite*
train_gpt2_sla.cu|plan.projected_index(read.pair) * hs;|(plan.projected_index(read.pair) + 1) % projected * hs;|test_gpt2_sla_cpu|*Graph.HasTheLosses*
train_gpt2_sla.cu|view.accumulate = read.accumulate;|view.accumulate = false;|test_gpt2_sla_cpu|*Graph.HasTheLosses*
train_gpt2_sla.cu|plan.lent_index(read.pair) * hs;|0;|test_gpt2_sla_cpu|*Graph.HasTheLosses*
train_gpt2_sla.cu|for (int head : plan.unread(l)) fold(head, nullptr);||test_gpt2_sla_cpu|*Graph.HasThemWhenDead*
train_gpt2_sla.cu|lnf + row * C, C, 1.0f, model.grads.wte|lnf + row * C, C, 0.0f, model.grads.wte|test_gpt2_sla_cpu|*Graph.*
train_gpt2_sla.cu|a.targets + row, count|a.targets, count|test_gpt2_sla_cpu|*Graph.*several_logit_chunks
train_gpt2_sla.cu|B) * T * double(grad_accum_steps)))|B) * T))|test_gpt2_sla_cpu|*Graph.*nine*
train_gpt2_sla.cu|? float(o.weight_decay) : 0.0f|? float(o.weight_decay) : float(o.weight_decay)|test_gpt2_sla_cpu|*Golden.*
train_gpt2_sla.cu|o.grad_clip > 0 ?|o.grad_clip > 1e9 ?|test_gpt2_sla_cpu|*Golden.*
train_gpt2_sla.cu|device_memset(a.dresidual, 0, size_t(N * C) * sizeof(floatX));||test_gpt2_sla_cpu|Memory.NoActivation*
train_gpt2_sla.cu|rows(s.fch, 4 * C), rows(s.ln2, C), p|rows(s.fch, 4 * C), s.ln2, p|test_gpt2_sla_cpu|Generation.Continues*
train_gpt2_sla.cu|uint32_t(step), uint64_t(n))|0, uint64_t(n))|test_gpt2_sla_cpu|Generation.IsAFunction*
train_gpt2_sla.cu|"logits", a.logits, {model.logit_rows, model.logit_stride}|"logits", a.logits, {int64_t(model.T), int64_t(model.T)}|test_gpt2_sla_cpu|Memory.ActivationsGrow*
train_gpt2_sla.cu|int64_t full = spec.qkv_layer < 0 ? row :|int64_t full = true ? row :|test_gpt2_sla_cpu|DeadRows.DoNot*
train_gpt2_sla.cu|gpt2_init_weights(GPT2& model, uint64_t seed) {|gpt2_init_weights(GPT2& model, uint64_t seed) { seed += uint64_t(clock());|test_gpt2_sla_cpu|Bits.AreTheSame*
train_gpt2_sla.cu|spec.init_std * random|0.02 * random|test_gpt2_sla_cpu|Initialisation.*
llmc/parameters.h|C + part * C +|C + 0 * part * C +|test_gpt2_sla_cpu|*Golden.*
llmc/flops.h|return 6 * matmul|return 5 * matmul|test_gpt2_sla_cpu|DeadRows.AreExactly*
llmc/checkpoint.cpp|out + "/" + unfinished_prefix + number|out + "/step_" + number|test_cli|*Killed*
train_gpt2_sla.cu|run.train->next_window = saved.next_window;||test_cli|*AResumedRun*
train_gpt2_sla.cu|run.step = saved.step;|run.step = saved.step - 1;|test_cli|*AResumedRun*
train_gpt2_sla.cu|demand(saved.seed == now.seed|demand(true|test_cli|*ResumingAsAnother*
END
}

caught=0 missed=0
while IFS='|' read -r file old new program filter; do
  case "$file|$old|$new|$program|$filter" in *"${1:-}"*) ;; *) continue ;; esac
  old=$(printf '%b' "$old") new=$(printf '%b' "$new")
  original=$(cat "$file"; echo x)
  original=${original%x}
  planted=${original/"$old"/"$new"}
  if [ "$planted" = "$original" ]; then echo "error: $file: no longer holds: $old" >&2; exit 1; fi
  cp -p "$file" "$copy/kept"
  printf '%s' "$planted" >"$file"
  programs=("build/$program")
  [ "$program" != test_cli ] || programs+=(train_gpt2_sla_cpu)
  if ! compile "${programs[@]}" >"$copy/log" 2>&1; then echo "error: the planted bug does not compile: $file: $new" >&2; tail -n 5 "$copy/log" >&2; exit 1; fi
  if timeout 120 "build/$program" --gtest_filter="$filter" >"$copy/log" 2>&1; then
    echo "MISSED  $file: $old -> $new ($program $filter)"
    missed=$((missed + 1))
  else
    echo "caught  $file: $old -> $new: $(grep -m 1 -o '^\[  FAILED  \] [^ ,]*' "$copy/log" | cut -c 14- || echo "$program died")"
    caught=$((caught + 1))
  fi
  cp "$copy/kept" "$file"  # with a new time, so that make builds it again
done < <(bugs)
echo "$caught caught, $missed missed"
[ $missed -eq 0 ]
