"""Launchers, accuracy gate, benchmarks and their analysis; what `evaluation/` at the root of the repository calls."""
