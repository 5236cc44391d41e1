#!/bin/sh
# MiMo prefill benchmark of a running server: a matrix of short and one of long prompts, any data set.
# Settings are environment variables; `run_benchmark_mimo_pro_prefill.sh --variables` lists them, DRY_RUN=1 prints the commands.
exec "${PYTHON:-python3}" -m sglang_dflash_rocm.evaluation.matrix mimo-prefill "$@"
