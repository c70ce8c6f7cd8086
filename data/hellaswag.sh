#!/usr/bin/env bash
# HellaSwag's 10,042 validation questions, in llm.c's format for evaluation: data/hellaswag-gpt2/hellaswag_val.bin, in
# GPT-2's tokens, or, with TOKENIZER=bytes, in data/hellaswag/. Prints the file as its last line. HELLASWAG_URL is
# another location of the same file (https://, file://).
set -euo pipefail
corpus=hellaswag
source -- "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
[[ ${TOKENIZER-} != bpe* ]] || fail "TOKENIZER=$TOKENIZER: it must be gpt2 (the default) or bytes; data/convert makes" \
  "questions for a model with a vocabulary of its own"
TOKENIZER=${TOKENIZER:-gpt2} choose_tokenizer hellaswag
exit_if_done "$out/hellaswag_val.bin"
say "fetching 12 MB, writing at most 10 MB of tokens: some seconds"
questions=$root/data/.download/hellaswag_val.jsonl
[[ -e $questions ]] ||  # an interrupted run may have left it
  download "${HELLASWAG_URL:-https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl}" \
    "$questions" 12246618 0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588 "set HELLASWAG_URL"
mkdir -p "$out"
run convert "$questions" "$out/hellaswag_val.bin"
rm -f "$questions"
echo "$out/hellaswag_val.bin"
