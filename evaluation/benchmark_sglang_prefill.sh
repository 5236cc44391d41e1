#!/bin/sh
# Prefill benchmark of a running server: input lengths x concurrencies, one output token.
# Settings are environment variables; `benchmark_sglang_prefill.sh --variables` lists them, DRY_RUN=1 prints the commands.
exec "${PYTHON:-python3}" -m sglang_dflash_rocm.evaluation.matrix prefill "$@"
