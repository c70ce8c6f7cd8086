#!/usr/bin/env bash
# GPT-2 350M with skip-layer attention as the paper has it: from layer 18 on, 12 of 16 heads read the K/V of the layer
# 18 below. scripts/run_gpt2.sh says what can be given: a T of 4096 (the default), 8192 or 16384, and more options of
# the trainer.
exec "$(dirname "$0")/run_gpt2.sh" gpt2-350M-sla d24 'sla(18,12)' "$@"
