#!/usr/bin/env bash
# The baseline of run_gpt2_350M_sla.sh: plain GPT-2 350M, everything else the same.
# scripts/run_gpt2.sh says what can be given: a T of 4096 (the default), 8192 or 16384, and more options of the trainer.
exec "$(dirname "$0")/run_gpt2.sh" gpt2-350M d24 plain "$@"
