"""The launchers' environment variables: default, what is allowed, what for. Their help and `evaluation/README.md` are
made from this table."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from sglang_dflash_rocm.environ import Variable, at_least, one_of
from sglang_dflash_rocm.evaluation.variables import default_text, number, port, switch

NATIVE_MXFP4, MXFP4_TO_FP8 = "native-mxfp4", "mxfp4-to-fp8"

#: DFLASH's block of the released draft, the first token included.
BLOCK_SIZE = 8


def _page_size(text: str) -> int:
    return int(one_of("16", "32", "64", "128")(text))


MODEL_PATH = Variable(
    "MODEL_PATH",
    Path("/models/MiMo-V2.6-Flash-MOPD"),
    Path,
    "a directory with the checkpoint",
    "target checkpoint",
)
DRAFT_MODEL_PATH = Variable(
    "DRAFT_MODEL_PATH",
    None,
    Path,
    "a directory with the draft's checkpoint",
    "DFlash draft; not set: `dflash` inside `MODEL_PATH`",
)
HOST = Variable(
    "HOST", "127.0.0.1", str, "an address of this machine", "address to listen on; `0.0.0.0` serves other machines too"
)
PORT = Variable("PORT", 30000, port, "a port, 1 to 65535", "port of the HTTP server")
CHUNKED_PREFILL_SIZE = Variable(
    "CHUNKED_PREFILL_SIZE",
    32768,
    at_least(1),
    "a number of tokens, a multiple of `PAGE_SIZE` times the attention groups",
    "tokens per prefill step; SGLang gives each DP attention group its share, half of it here",
)
MEM_FRACTION_STATIC = Variable(
    "MEM_FRACTION_STATIC",
    0.75,
    number(lambda share: 0 < share < 1),
    "a number above 0 and below 1",
    "share of a GPU's memory for weights and KV pools",
)
SWA_FULL_TOKENS_RATIO = Variable(
    "SWA_FULL_TOKENS_RATIO",
    0.03,
    number(lambda ratio: 0 < ratio <= 1),
    "a number above 0, at most 1",
    "tokens of the sliding-window pool per token of the full pool",
)
MAX_RUNNING_REQUESTS = Variable(
    "MAX_RUNNING_REQUESTS",
    96,
    at_least(2),
    "a whole number, at least one per DP rank, so 2",
    "requests that run at once, over both DP ranks together",
)
DISABLE_RADIX_CACHE = switch("DISABLE_RADIX_CACHE", 1, "1: no prefix cache, so that no answer hangs on an earlier one")
ENABLE_TWO_BATCH_OVERLAP = switch(
    "ENABLE_TWO_BATCH_OVERLAP", 0, "two-batch overlap; 1 is refused, SGLang 0.5.23 cannot split a DFLASH verify"
)
SGLANG_FLYPA_MIMO_PREFILL = switch(
    "SGLANG_FLYPA_MIMO_PREFILL", 0, "FlyPA prefill kernel; 1 is refused, this package does not ship one yet"
)
SGLANG_AITER_PA_DECODE_IMPL = Variable(
    "SGLANG_AITER_PA_DECODE_IMPL",
    "flydsl",
    one_of("flydsl"),
    "flydsl; aiter's own kernels are wrong or crash for MiMo's 192/128 heads on gfx942",
    "paged attention of decode and verify; says the same as `ATTENTION_BACKEND=flydsl`",
)
ATTENTION_BACKEND = Variable(
    "ATTENTION_BACKEND",
    "flydsl",
    one_of("flydsl", "triton"),
    "flydsl or triton",
    "attention of target and draft: this package's kernels, or SGLang's",
)
PAGE_SIZE = Variable(
    "PAGE_SIZE", 64, _page_size, "16, 32, 64 or 128", "tokens per KV page; what the flydsl kernels have"
)
MM_ENABLE_DP_ENCODER = switch(
    "MM_ENABLE_DP_ENCODER",
    0,
    "1: images, with a vision tower on every rank; 0: text only. Images while it is 0 are not served",
)
WEIGHT_RECIPE = Variable(
    "WEIGHT_RECIPE",
    MXFP4_TO_FP8,
    one_of(NATIVE_MXFP4, MXFP4_TO_FP8),
    f"{NATIVE_MXFP4} or {MXFP4_TO_FP8}",
    "MXFP4 experts: made block FP8 once, on loading, or kept as they are (gfx942 has no FP4 matrix instructions, and "
    "whether aiter's kernels do without is not known); no effect on a checkpoint that is FP8 already",
)
SGLANG_SIMULATE_ACC_LEN = Variable(
    "SGLANG_SIMULATE_ACC_LEN",
    5.56,
    number(lambda length: 1 <= length <= BLOCK_SIZE),
    f"a number from 1 to the block, {BLOCK_SIZE}",
    "fake prefill only: mean accept length that is simulated, as its KV cache holds no prompt",
)
EXTRA_ARGS = Variable(
    "EXTRA_ARGS",
    (),
    lambda text: tuple(shlex.split(text)),
    "server flags, quoted as in a shell",
    "more flags of `sglang.launch_server`; they come last, so they win",
)
DRY_RUN = switch("DRY_RUN", 0, "1: print the command and stop")

VARIABLES: tuple[Variable, ...] = (
    MODEL_PATH,
    DRAFT_MODEL_PATH,
    HOST,
    PORT,
    CHUNKED_PREFILL_SIZE,
    MEM_FRACTION_STATIC,
    SWA_FULL_TOKENS_RATIO,
    MAX_RUNNING_REQUESTS,
    DISABLE_RADIX_CACHE,
    ENABLE_TWO_BATCH_OVERLAP,
    SGLANG_FLYPA_MIMO_PREFILL,
    SGLANG_AITER_PA_DECODE_IMPL,
    ATTENTION_BACKEND,
    PAGE_SIZE,
    MM_ENABLE_DP_ENCODER,
    WEIGHT_RECIPE,
    SGLANG_SIMULATE_ACC_LEN,
    EXTRA_ARGS,
    DRY_RUN,
)


def wrong_values(env: Mapping[str, str]) -> dict[str, str]:
    """For each variable whose value is not allowed a sentence: its name, the value, what is allowed."""
    found = {}
    for variable in VARIABLES:
        try:
            variable.get(env)
        except ValueError as error:
            found[variable.name] = str(error).replace("`", "")
    return found


def markdown_table() -> str:
    """All variables, one row each."""
    rows = ["| variable | default | allowed | what |", "|---|---|---|---|"]
    for variable in VARIABLES:
        default = f"`{text}`" if (text := default_text(variable)) else "none"
        rows.append(f"| `{variable.name}` | {default} | {variable.allowed} | {variable.doc} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown_table())
