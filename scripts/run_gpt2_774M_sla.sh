#!/usr/bin/env bash
# GPT-2 774M with skip-layer attention as the paper has it: from layer 27 on, 15 of 20 heads read the K/V of the layer
# 27 below. scripts/run_gpt2.sh says what can be given: a T of 4096 (the default), 8192 or 16384, and more options of
# the trainer.
exec "$(dirname "$0")/run_gpt2.sh" gpt2-774M-sla d36 'sla(27,15)' "$@"
