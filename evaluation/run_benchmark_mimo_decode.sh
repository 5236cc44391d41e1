#!/bin/sh
# Decode benchmark of a running fake-prefill server; its records are stamped as simulated.
# Settings are environment variables; `run_benchmark_mimo_decode.sh --variables` lists them, DRY_RUN=1 prints the commands.
exec "${PYTHON:-python3}" -m sglang_dflash_rocm.evaluation.matrix decode "$@"
