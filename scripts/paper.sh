#!/usr/bin/env bash
# `make paper SIZE=tiny|small|full|night`: the tables of the SLA paper, and of other wirings, over several seeds.
#
#   scripts/paper.sh tiny|small|full [table ...]      tables: 1 2 3 4; default: all
#   scripts/paper.sh night                            table 5
#
#   1  n_l over L: whose K/V, with 3/4 of the heads
#   2  n_h over h: how many heads, with 3/4 of the layers
#   3  sizes and lengths: sla(3/4 L, 3/4 h) and plain GPT-2
#   4  other wirings, at equal FLOPs, and at equal K/V bytes a token
#   5  lengths x regimes: sla(3/4 L, 3/4 h) and plain, as the paper trains them and each at its own best rate
#
#   tiny   models of 4 and 8 layers and bytes of the kernel's sources: within two hours on two cores
#   small  GPT-2's tokens of OpenWebText and models of 12 layers: hours on one GPU
#   full   the paper's: 124M, 350M and 774M, T 4,096 to 16,384, 18,000 updates of 524,288 tokens
#   night  a model of 8 layers, T 256, 1,024 and 4,096, bytes of the kernel's sources: a night on two idle cores
#
# All rows of a seed read the same data in the same order. Every row is a run of scripts/compare.sh, which interleaves
# and resumes them: the same command resumes where it was stopped. Runs are in OUT, and OUT/paper.html has the tables,
# written anew after each group of runs.
#
# Environment: OUT=folder (runs/paper-SIZE); SEEDS=n (3); DATA=folder with train_*.bin and val_*.bin; TRAINER, JOBS: see
# compare.sh; EVALUATOR: the trainer's evaluate_gpt2_sla; STEPS=n: updates of each run, in place of the size's
set -uo pipefail
source -- "$(dirname -- "$0")/runs.sh"
enter_root OUT DATA TRAINER EVALUATOR
source scripts/stoppable.sh
die() { echo "error: paper.sh: $*" >&2; exit 1; }
size=${1-}
[ $# -eq 0 ] || shift
if [ "$size" = night ]; then
  [ $# -eq 0 ] || die "SIZE=night has one table, 5"
  set -- 5
fi
[ $# -gt 0 ] || set -- 1 2 3 4
tables=("$@")
for table in "${tables[@]}"; do
  [[ $table =~ ^[1-4]$ ]] || [ "$size" = night ] || die "table $table: there are 1, 2, 3 and 4"
done
has_table() { [[ " ${tables[*]} " = *" $1 "* ]]; }

# layers and heads of the tables 1, 2 and 4, the shape of their model, its length T, the tokens of a micro-batch (at
# least a sequence) and of an update (0: a micro-batch's), updates, and what each table 3's column is.
position_tokens=65536  # of each file of the validation data, for losses by position
case $size in
  tiny)
    layers=8 heads=8 T=512 micro_batch=512 update=0 steps=2000 corpus=linux
    # Batches are small: of so few tokens, updates count.
    model=(--layers 8 --heads 8 --channels 128 --vocab-size 257)
    common=(-l 1e-3 -u 100 -c 0.1 -v 500 -m 128)
    sizes=("4 4 128 --layers 4 --heads 4 --channels 128 --vocab-size 257"
      "4 4 512 --layers 4 --heads 4 --channels 128 --vocab-size 257"
      "8 8 128 ${model[*]}" "8 8 512 ${model[*]}") ;;
  small)
    layers=12 heads=12 T=4096 micro_batch=16384 update=65536 steps=4000 corpus=openwebtext-gpt2
    model=(--layers 12 --heads 12 --channels 384)
    common=(-l 6e-4 -q 0.1 -u 200 -c 0.1 -v 250)
    sizes=("6 6 1024 --layers 6 --heads 6 --channels 384" "6 6 4096 --layers 6 --heads 6 --channels 384"
      "12 12 1024 ${model[*]}" "12 12 4096 ${model[*]}") ;;
  full)
    layers=12 heads=12 T=4096 micro_batch=4096 update=524288 steps=18000 corpus=openwebtext-gpt2
    model=(-e d12)
    common=(-l 1.5e-4 -q 0.1 -u 2000 -c 0.1 -v 250 -n 500)
    sizes=()
    for T3 in 4096 8192 16384; do sizes+=("12 12 $T3 -e d12" "24 16 $T3 -e d24" "36 20 $T3 -e d36"); done ;;
  night)
    layers=8 heads=4 T=4096 micro_batch=4096 update=4096 steps=3500 position_tokens=262144
    corpus=linux-sound-soc-codecs  # files of 26 kB on average, each longer than most contexts
    model=(--layers 8 --heads 4 --channels 128 --vocab-size 257)
    common=(-c 0.1 -v 1750 -m 0 -n 250)
    paper_rate=9e-4  # 1.5e-4 of 768 channels: hidden matrices take rates of 1 / channels (Yang et al. 2022)
    lengths=(256 1024 4096) rates=(2e-3 4e-3 8e-3) ;;
  *) die "SIZE=$size: it must be tiny, small, full or night" ;;
esac
steps=${STEPS:-$steps} seeds=${SEEDS:-3} out=${OUT:-runs/paper-$size} data=${DATA:-data/$corpus}
find_trainer
evaluator=${EVALUATOR:-${trainer%train_gpt2_sla*}evaluate_gpt2_sla${trainer##*train_gpt2_sla}}
if ! ls "$data"/train_*.bin >/dev/null 2>&1; then
  [ -z "${DATA:-}" ] || die "$data: no train_*.bin in it; data/README.md says how to make some"
  if [ $corpus = linux ]; then data/linux.sh
  elif [ "$size" = night ]; then PART=sound/soc/codecs data/linux.sh
  else TOKENIZER=gpt2 data/openwebtext.sh
  fi || die "no corpus; name a folder of tokens with DATA="
fi
few=$(((steps + 3) / 4))  # the updates of the paper's regime in table 5
mkdir -p "$out"
[ $update -eq 0 ] || common+=(-d "$update")
pattern=$(pattern_of "$data")
common+=(-i "$pattern/train_*.bin" -j "$pattern/val_*.bin" --shuffle)

# ----------------------------------------------------------------------------
# The rows

quarter() { echo $(($2 * $1 / 4)); }   # quarter <n> <of>
sla() { echo "sla($(quarter 3 "$1"),$(quarter 3 "$2"))"; }   # the paper's recommendation for so many layers and heads
first_rate=${rates[1]-}                 # of table 5: the middle one
main="T$T"                              # the folder of the runs that tables 1, 2 and 4 share
table1=(plain) table2=(plain)
for n in 1 2 3; do table1+=("sla($(quarter $n $layers),$(quarter 3 $heads))"); done
for n in 1 2 3 4; do table2+=("sla($(quarter 3 $layers),$(quarter $n $heads))"); done
equal_flops=("$(sla $layers $heads)" "also($((layers / 4)),$((heads / 2)))" "gqa($((heads / 2)))"
  "window($((T / 4)),SSSL)"
  "topk($((T / 16)))" "reuse(2)")
equal_kv=("sla($((layers / 2)),$heads)" "share(2)" "gqa($((heads / 2)))")
table5=("rope" "rope $(sla $layers $heads)")

# tuned_folder <length> <rate>: the folder of table 5's tuned runs.
tuned_folder() { echo "T$1-muon-$2"; }
# rates_and_losses <length> <wiring>: a line "RATE LOSS" for each rate at which the run of seed 1 has done all updates,
# from the best to the worst.
rates_and_losses() {
  local rate loss
  for rate in "${rates[@]}"; do
    loss=$(final_loss "$out/$(tuned_folder "$1" "$rate")/$(wiring_name "$2")-1" "$steps")
    [ -z "$loss" ] || echo "$rate $loss"
  done | LC_ALL=C sort -g -k 2
}
# best_rate <length> <wiring>: of the rates that have been tried; before that, the one that is tried first.
best_rate() {
  local best
  best=$(rates_and_losses "$@" | sed -n '1s/ .*//p')
  echo "${best:-$first_rate}"
}

# ----------------------------------------------------------------------------
# The page

# The paper's validation losses less its baseline's, of 18,000 updates of 524,288 of GPT-2's tokens, one run each.
# Tables 1 and 2 are of 124M at T = 16,384, by quarters of 12 layers and 12 heads; 1 with half of the heads.
paper_n_l=(-0.0868 -0.0973 -0.1076) paper_n_h=(-0.0283 -0.1076 -0.1329 -0.1183)
declare -A paper_sizes=(["12 4096"]="-0.0096, speed -1.69 %" ["12 8192"]="-0.0057, speed -0.28 %"
  ["12 16384"]="-0.1329, speed +0.83 %" ["24 4096"]="-0.0139, speed -0.76 %" ["24 8192"]="-0.0829, speed -2.34 %"
  ["36 4096"]="-0.0115, speed -1.24 %")
declare -A published  # of a wiring in the section that is being written

# section <title> <text>, then runs <folder> <wiring ...>: appends to the outline.
outline=$out/outline.txt
section() { printf '# %s\n%s\n' "$1" "${*:2}" >>"$outline"; }  # <title> <text, of several parts ...>
runs() {
  local folder=$1 wiring seed
  shift
  for wiring in "$@"; do
    for ((seed = 1; seed <= seeds; seed++)); do
      echo "run $out/$folder/$(wiring_name "$wiring")-$seed" >>"$outline"
      [ -z "${published["$wiring"]-}" ] || echo "published ${published["$wiring"]}" >>"$outline"
    done
  done
}

# rates_said <length> <wiring>: which rates have been tried, which is taken, and which have not been tried.
rates_said() {
  local found
  found=$(rates_and_losses "$@")
  [ -n "$found" ] || { echo "$2: no rate has been tried to the end yet."; return; }
  awk -v wiring="$2" -v all="${rates[*]}" '
    { text = text sprintf("%s%s: %.4f", NR > 1 ? ", " : "", $1, $2); tried[$1]; if (NR == 1) best = $1 }
    END {
      n = split(all, rates, " ")
      for (i = 1; i <= n; i++) if (!(rates[i] in tried)) open = open (open == "" ? "; not tried yet: " : ", ") rates[i]
      print wiring ": " best " is taken" (best == rates[1] || best == rates[n] ? ", at the edge of the three" : "") \
        " (" text open ")."
    }' <<<"$found"
}

# What the page of the paper's tables is about, in two paragraphs.
opening() {
  local of_bytes=
  [ $corpus != linux ] || of_bytes=" (those of this page in nats a byte)"
  echo "The tables of the paper Skip-Layer Attention (arXiv 2406.11274) at SIZE=$size: $seeds seeds a row, $steps" \
    "updates of $((update > 0 ? update : micro_batch)) tokens. A row says \"lower\" or \"higher\" only where" \
    "the 95 % interval of the differences to the first row, over seeds, has no 0 in it. Beside the differences stand" \
    "the paper's. What differs: the paper trains models of 124M to 774M for 18,000 updates of 524,288 of GPT-2's" \
    "tokens from OpenWebText, T = 4,096 to 16,384, its losses are in nats a token$of_bytes, and each is of one run," \
    "without an interval."
  echo "What the paper leaves open: at equal tokens its baseline gets worse with T (124M: 3.1858, 3.2077 and 3.3826" \
    "nats at 4,096, 8,192 and 16,384), as each learning rate and number of updates is the same; and what skip-layer" \
    "attention gains is largest where that baseline is worst. A baseline at its own best learning rate might gain," \
    "too."
}

# What the page of SIZE=night is about, in two paragraphs.
opening_of_night() {
  echo "The question of long contexts at a small size: models of $layers layers of $heads heads and 128 channels that" \
    "read up to 256, 1,024 and 4,096 bytes, $update a step and $((steps * update)) in all at each length, $seeds" \
    "seeds. Losses by position say whether a context is used: a model that uses it predicts better where more of it" \
    "is before. A row says \"lower\" or \"higher\" only where the 95 % interval of the differences to the first row," \
    "over seeds, has no 0 in it. Losses are in nats a byte."
  echo "What differs from the paper: the size; bytes in place of GPT-2's tokens; the kernel's drivers of sound codecs" \
    "in place of OpenWebText; and rotated q and k (rope) in place of learned positions, as small models learn to use" \
    "their context sooner with them."
}

write_page() {
  local n t
  {
    echo "# What this is"
    if has_table 5; then opening_of_night; else opening; fi
  } >"$outline"
  if has_table 1; then
    section "Table 1: n_l, of $layers layers" \
      "The last 3/4 of the heads attend to the K/V of the layer n_l below: sla(n_l, n_h). The paper's n_l = 3, 6 and" \
      "9 of 12 stand beside the same quarters; there half of the heads did; n_l = 1 gave +0.0204, n_l = 11 -0.0092."
    published=()
    for n in 1 2 3; do published["${table1[n]}"]="${paper_n_l[n - 1]}"; done
    runs "$main" "${table1[@]}"
  fi
  if has_table 2; then
    section "Table 2: n_h, of $heads heads" \
      "The last n_h heads attend to the K/V of the layer 3/4 of the depth below: sla(n_l, n_h)." \
      "The paper's n_h = 3, 6, 9 and 12 of 12 stand beside the same quarters."
    published=()
    for n in 1 2 3 4; do published["${table2[n]}"]="${paper_n_h[n - 1]}"; done
    runs "$main" "${table2[@]}"
  fi
  if has_table 3; then
    local one
    for one in "${sizes[@]}"; do
      read -r l h t model3 <<<"$one"
      section "Table 3: $model3, T = $t" \
        "The recommended wiring and plain GPT-2, by size and length." \
        "The paper's differences: 124M at 4,096, 8,192 and 16,384 tokens -0.0096, -0.0057 and -0.1329; 350M at 4,096" \
        "and 8,192 -0.0139 and -0.0829; 774M at 4,096 -0.0115; speeds from 2.34 % lower to 0.83 % higher."
      published=()
      [ "$size" != full ] || published["$(sla "$l" "$h")"]="${paper_sizes["$l $t"]-}"
      runs "$(folder3 "$one")" plain "$(sla "$l" "$h")"
    done
  fi
  published=()
  if has_table 5; then
    local wiring
    for t in "${lengths[@]}"; do
      section "Table 5: T = $t, each wiring at its own best rate" \
        "Muon, $steps updates; the rate is the best of ${rates[*]} by the validation loss of seed 1." \
        "$(for wiring in "${table5[@]}"; do rates_said "$t" "$wiring"; done)"
      for wiring in "${table5[@]}"; do runs "$(tuned_folder "$t" "$(best_rate "$t" "$wiring")")" "$wiring"; done
      section "Table 5: T = $t, the paper's regime" \
        "AdamW at $paper_rate, which is the paper's 1.5e-4 for as many channels as these, a quarter of the updates" \
        "($few), a ninth of them to warm up, as the paper's: few updates at a low rate."
      runs "T$t-paper" "${table5[@]}"
    done
  fi
  if has_table 4; then
    section "Table 4a: other wirings at equal FLOPs" \
      "Each run has as many updates as the FLOPs of plain GPT-2's $steps allow."
    runs "$main" plain
    runs equal-flops "${equal_flops[@]}"
    section "Table 4b: other wirings at equal K/V" \
      "All keep half of plain GPT-2's bytes of K/V a token; differences are to the first."
    runs "$main" "${equal_kv[@]}"
  fi
  ./report --outline "$outline" -o "$out/paper.html"
}

# ----------------------------------------------------------------------------
# The runs

# has_positions <run> <checkpoint>: whether the run's losses by position are complete, up to the context length, and
# newer.
has_positions() {
  local csv=$1/positions.csv context
  context=$(sed -n 's/^ *"n_positions": *\([0-9]*\),*$/\1/p' "$2/config.json")
  [ "$csv" -nt "$2" ] && [ "$(head -n 1 "$csv")" = position,tokens,loss ] &&
    [[ $(tail -n 1 "$csv") =~ ^$context,[0-9]+,[0-9.e+-]+$ ]]
}

# measure_positions <folder> <length>: losses by position, of position_tokens at even distances in each file of the
# validation data, as OUT/FOLDER/RUN/positions.csv where the run's last checkpoint is newer, or that file incomplete.
measure_positions() {
  local run last
  for run in "$out/$1"/*/; do
    last=$(ls -d "$run"step_*/ 2>/dev/null | tail -n 1)
    if [ -n "$last" ] && ! has_positions "$run" "$last"; then
      "$evaluator" "$last" "$data"/val_*.bin --windows $((position_tokens / $2)) \
        --positions "${run}positions.csv" -q >/dev/null || return
    fi
  done
}

# compare <folder> <length> <updates> <wirings, between ;> <options of the model ...>: the runs of seeds 1 to up_to.
# Ends the script if it was stopped or a run failed. With check=--check it only asks whether the runs that are there
# were made with these options.
up_to=$seeds
check=
compare() {
  local folder=$1 length=$2 updates=$3 wirings=$4
  shift 4
  stoppable scripts/compare.sh --wirings "$wirings" --seeds "$up_to" --out "$out/$folder" ${check:+"$check"} -- \
    "${common[@]}" "$@" -x "$updates" --max-seq-len "$length" -t "$length" \
    -b $((micro_batch > length ? micro_batch / length : 1))
  [ -z "$check" ] || { [ "$status" -eq 0 ] || exit "$status"; return; }
  [ "$status" -ne 0 ] || measure_positions "$folder" "$length" || status=$?
  write_page
  [ "$status" -eq 0 ] || exit "$status"
}
between() { local IFS=';'; echo "$*"; }

# The folder of a column of table 3: that of the other tables where it is the same model and length.
folder3() {
  local l h t model3
  read -r l h t model3 <<<"$1"
  if [ "$model3" = "${model[*]}" ] && [ "$t" = "$T" ]; then echo "$main"; return; fi
  echo "$(wiring_name "$model3" | sed 's/^_//')-T$t"
}

# The updates that take as many FLOPs as plain GPT-2's: by what the trainer says of the wiring's.
updates_of() {
  local share
  share=$("$trainer" "${model[@]}" --max-seq-len "$T" -t "$T" -b 1 --wiring "$1" --dry-run |
    sed -n 's/^relative to plain.* GFLOP, \([0-9.]*\) %$/\1/p')
  [ -n "$share" ] || return 1
  awk -v steps="$steps" -v share="$share" 'BEGIN { printf "%d", steps * 100 / share + 0.5 }'
}

main_rows=()
add_rows() {  # each wiring once
  local row
  for row in "$@"; do [[ ";$(between ${main_rows[@]+"${main_rows[@]}"});" = *";$row;"* ]] || main_rows+=("$row"); done
}
! has_table 1 || add_rows "${table1[@]}"
! has_table 2 || add_rows "${table2[@]}"
! has_table 4 || add_rows plain "${equal_kv[@]}"
all_runs() {
  [ ${#main_rows[@]} -eq 0 ] || compare "$main" "$T" "$steps" "$(between "${main_rows[@]}")" "${model[@]}"
  if has_table 3; then
    for one in "${sizes[@]}"; do
      read -r l h t model3 <<<"$one"
      # shellcheck disable=SC2086 # options, split at spaces
      compare "$(folder3 "$one")" "$t" "$steps" "plain;$(sla "$l" "$h")" $model3
    done
  fi
  if has_table 4; then
    for wiring in "${equal_flops[@]}"; do
      updates=$(updates_of "$wiring") || die "$wiring: $trainer --dry-run does not say its FLOPs"
      compare equal-flops "$T" "$updates" "$wiring" "${model[@]}"
    done
  fi
  # What is finished first says something already: seed 1 at all lengths, then the paper's regime, which is the shorter.
  if has_table 5; then
    both=$(between "${table5[@]}")
    tuned() { compare "$(tuned_folder "$1" "$2")" "$1" "$steps" "$3" "${model[@]}" "${muon[@]}" -l "$2"; }
    in_the_papers_regime() { compare "T$1-paper" "$1" "$few" "$both" "${model[@]}" "${as_the_paper[@]}"; }
    muon=(--optimizer muon -u $((steps / 30)))
    as_the_paper=(-l "$paper_rate" -q 0.1 -u $((few / 9)))
    for t in "${lengths[@]}"; do up_to=1 tuned "$t" "$first_rate" "$both"; done
    for t in "${lengths[@]}"; do in_the_papers_regime "$t"; done
    for rate in "${rates[@]}"; do
      for t in "${lengths[@]}"; do up_to=1 tuned "$t" "$rate" "$both"; done
    done
    for t in "${lengths[@]}"; do
      for wiring in "${table5[@]}"; do tuned "$t" "$(best_rate "$t" "$wiring")" "$wiring"; done
    done
  fi
}
# The page is of all tables: nothing of it is written before all runs that are there are known to be of them.
check=--check
all_runs
check=
all_runs
echo "$out/paper.html"
