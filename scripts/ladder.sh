# shellcheck shell=bash
# choose: which model makes most of the time, for scripts/train.sh. Each rung of the ladder is a model:
#
#   layers, heads, channels, context in tokens, tokens per update, learning rate
#
# dev/bench/results/ladder has the runs that the first four and the loss below come from. The others, which wait for a
# GPU, are extrapolated.
ladder="3 4 64 256 2048 1.2e-2
4 3 96 256 2048 1.2e-2
5 4 128 256 2048 8e-3
6 6 192 256 2048 6e-3
8 8 256 256 4096 3e-3
8 6 384 512 8192 3e-3
12 8 512 1024 32768 2e-3
12 12 768 1024 65536 2e-3"
# A text is read at most most_epochs times, by a model of at most most_weights weights per byte of it; with dropout
# where it is read more than dropout_epochs times by one of more than dropout_weights.
most_epochs=16 most_weights=10 dropout_epochs=4 dropout_weights=1

# The loss in nats per byte on the dictionary, by the weights in layers N and the bytes of text D: E + A / N^a + B /
# D^b.
# Repeated text is worth less than new: U bytes that are read R + 1 times are worth U (1 + 15.4 (1 - exp(-R / 15.4))) of
# new ones (Muennighoff et al., Scaling Data-Constrained Language Models).
# predicted <rung's layers> <channels> <batch> <ms of an update>: prints updates, tokens, times the text, and that loss
predicted() {
  LC_ALL=C awk -v layers="$1" -v channels="$2" -v batch="$3" -v ms="$4" -v longest="$longest" \
    -v text="$training_tokens" -v bytes="$bytes_a_token" -v most="$most_epochs" 'BEGIN {
      E = 0.64; A = 20.8; a = 0.36; B = 2109; b = 0.6
      tokens = longest / ms * batch
      times = tokens / text
      if (tokens > most * text) tokens = most * text
      worth = tokens <= text ? tokens : text * (1 + 15.4 * (1 - exp((1 - tokens / text) / 15.4)))
      N = 12 * layers * channels ^ 2
      updates = int(tokens / batch)
      printf "%d %.3g %.3g %.3f\n", updates < 20 ? 20 : updates, tokens, times, E + A / N ^ a + B / (worth * bytes) ^ b
    }'
}

# Tries models from small to large until one has a higher loss than the one before, by how fast they train here. Writes
# the config.toml $chosen, why as a comment in it.
choose() {
  local layers heads channels context batch rate  # a rung
  local dropout log weights bytes micro ms flops updates tokens times loss lines pace=0 least='' config='' why=''
  trial=$(mktemp -d)
  trap 'rm -rf "$trial"' EXIT
  # Interrupted, the trainer ends with a status, as it does where its model does not fit.
  trap 'exit 130' INT TERM HUP
  bytes=$(calculate "printf \"%.0f\", $training_tokens * $bytes_a_token")
  while read -r layers heads channels context batch rate; do
    weights=$((12 * layers * channels ** 2))
    if [ -n "$config" ] && [ "$weights" -gt $((most_weights * bytes)) ]; then break; fi
    # A micro-batch, as validation has it, and the token after it.
    micro=$((on_gpu ? (batch < 16384 ? batch : 16384) : (context < 1024 ? 1024 : context)))
    while [ "$micro" -ge "$validation_tokens" ] && [ "$micro" -gt "$context" ]; do micro=$((micro / 2)); done
    [ "$micro" -lt "$validation_tokens" ] || break
    lines="layers = $layers
heads = $heads
channels = $channels
max-seq-len = $context
wiring = \"sla($((layers * 3 / 4)),$((heads * 3 / 4))) rope\"
seq-len = $context
micro-batch = $((micro / context))
total-batch = $batch
shuffle = true
optimizer = \"muon\"
learning-rate = $rate
weight-decay = 0.1"
    for dropout in 0 0.1; do  # which takes time, on a small text
      printf '%s\ndropout = %s\n' "$lines" "$dropout" >"$trial/config.toml"
      # Others may have the machine for a moment: twice. A larger model makes more of it than a smaller one; where it
      # seems to make less, once more.
      for log in "$trial/"{1,2,3}; do
        # The larger ones may not fit into memory.
        "$trainer" --config "$trial/config.toml" "${files[@]}" -x 4 -v 0 -o "$log" >/dev/null ||
          { [ -n "$config" ] && break 3 || exit 1; }
        ms=$(sed -n 's/^{"step":.*"ms":\([0-9.]*\).*/\1/p' "$trial/"*/log.jsonl | LC_ALL=C sort -n | head -n 1)
        flops=$(sed -n 's/.*"flops_per_token":\([0-9.e+]*\).*/\1/p' "$log/log.jsonl")
        [ -n "$ms" ] && [ -n "$flops" ] || die "$trainer -x 4 tells no time of an update"
        [ "$log" = "$trial/1" ] || calculate "exit !($batch * $flops / $ms < 0.9 * $pace)" || break
      done
      rm -r "$trial/"*/  # they have checkpoints
      read -r updates tokens times loss < <(predicted "$layers" "$channels" "$batch" "$ms")
      [ "$weights" -gt $((dropout_weights * bytes)) ] && calculate "exit !($times > $dropout_epochs)" || break
    done
    calculate "printf \"%d layers, %d channels: %.0f tokens/s, %.3g million tokens: loss about %.2f\\n\", $layers,
      $channels, 1000 * $batch / $ms, $tokens / 1e6, $loss"
    pace=$(calculate "print $batch * $flops / $ms")
    if [ -n "$least" ] && calculate "exit !($loss >= $least)"; then break; fi
    least=$loss
    config="$lines
steps = $updates
warmup = $((updates / 16 + 1))
val-every = $((updates / 8 + 1))
val-batches = $((40960 / micro))
sample-every = $((updates / 4 + 1))
sample-length = 256
temperature = 0.7
checkpoint-every = $((updates / 4 + 1))
dropout = $dropout"
    why=$(calculate "printf \"%g minutes on this machine are %.1e FLOPs (%.2f TFLOP/s): \", $minutes,
      $longest / $ms * $batch * $flops, $batch * $flops / $ms / 1e9")
    why+="$layers layers, $channels channels, context $context, $batch tokens per update, learning rate $rate, "
    why+=$(calculate "printf \"%.3g million tokens in %d updates, %.2g times the text\", $tokens / 1e6, $updates,
      $tokens / $training_tokens")
    if calculate "exit !($times > $most_epochs)"; then
      why+="; the text is the limit: it is read $most_epochs times, which takes less than the time"
    fi
    [ "$dropout" = 0 ] || why+="; so with dropout"
  done <<<"$ladder"
  rm -r "$trial"
  trap - EXIT INT TERM HUP
  [ -n "$config" ] || die "$data: is too little text to validate with"
  echo "$why"
  mkdir -p "$(dirname "$chosen")"
  printf '# %s\n%s\n' "$why" "$config" >"$chosen"
}
