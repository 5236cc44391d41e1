"""Mirror of ``sglang/srt``: each file extends the upstream file of the same path."""
