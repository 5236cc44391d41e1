#!/bin/sh
# Highest request rate that keeps TARGET_TTFT_MS on a running server.
# Settings are environment variables; `bench_sglang_prefill_sweep.sh --variables` lists them, DRY_RUN=1 prints the commands.
exec "${PYTHON:-python3}" -m sglang_dflash_rocm.evaluation.sweep_run "$@"
