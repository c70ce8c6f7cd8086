#!/usr/bin/env bash
# GPT-2 124M with skip-layer attention as the paper has it: from layer 9 on, 9 of 12 heads read the K/V of the layer 9
# below. scripts/run_gpt2.sh says what can be given: a T of 4096 (the default), 8192 or 16384, and more options of the
# trainer.
exec "$(dirname "$0")/run_gpt2.sh" gpt2-124M-sla d12 'sla(9,9)' "$@"
