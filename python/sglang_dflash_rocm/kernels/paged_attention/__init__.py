"""Paged attention for MiMo's head sizes: the reference today, the FlyDSL kernels beside it."""
