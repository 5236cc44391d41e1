#!/usr/bin/env bash
# Decode benchmarks without a prefill server: two replicas of TP4, EP1, DFLASH, acceptance simulated.
# Variables: --help, or ../README.md. DRY_RUN=1 prints the command only. PYTHON names the interpreter.
set -euo pipefail
exec "${PYTHON:-python3}" -m sglang_dflash_rocm.evaluation.launchers tp4-decode-fake-prefill "$@"
