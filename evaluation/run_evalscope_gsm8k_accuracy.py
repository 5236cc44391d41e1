#!/usr/bin/env python3
"""GSM8K accuracy and accept length of a running server; see --help."""

from sglang_dflash_rocm.evaluation.accuracy import app

if __name__ == "__main__":
    app()
