#!/usr/bin/env python3
"""Analyse server logs and benchmark records into one report folder; ``--help`` lists the options."""

import typer

from sglang_dflash_rocm.evaluation.analyze import main

if __name__ == "__main__":
    typer.run(main)
