"""What a DFLASH server keeps on one GPU, in bytes: arithmetic on shapes, standard library only.

The start-up table, the explanation of a failed start and ``dflash-rocm plan`` share it. Sizes are per GPU (rank). KV
pools and what was there before them share the static part of the memory (``--mem-fraction-static``); the other tables
are allocated later, out of the rest, beside activations and graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30

#: Bytes per KV element.
KV_ITEMSIZE = {"bf16": 2, "fp8": 1}

STATIC, REST = "static", "rest"

_INT32, _INT64 = 4, 8
#: Rows per step of the draft's greedy head, and the rows that its tp=1 path takes at once.
_HEAD_CHUNK, _HEAD_CHUNK_ONE_RANK = 256, 1024
#: Request rows that the scheduler's length buffers start with.
_LENGTH_ROWS = 32


class BudgetError(ValueError):
    """A configuration that cannot be planned. The message names the key or flag, its value and the fix."""


@dataclass(frozen=True)
class KVLayers:
    """Attention layers of one kind: how many, KV heads in the checkpoint, elements per head of K and V."""

    layers: int
    kv_heads: int
    k_dim: int
    v_dim: int

    def bytes_per_token(self, attn_tp: int, itemsize: int) -> int:
        """Bytes that one token takes in all layers on one rank; a rank never holds less than one head."""
        return self.layers * max(1, self.kv_heads // attn_tp) * (self.k_dim + self.v_dim) * itemsize


@dataclass(frozen=True)
class TargetShape:
    """MiMo-V2's geometry. ``fused_tp`` is the TP size its fused QKV is interleaved for, ``None`` without fused QKV."""

    full: KVLayers
    swa: KVLayers
    q_heads: int
    window: int
    vocab_size: int
    hidden_size: int
    context_length: int
    fused_tp: int | None = None


@dataclass(frozen=True)
class DraftShape:
    """The draft's geometry. ``window`` of its SWA layers does not shorten its KV pool: the pool spans the target's."""

    kv: KVLayers
    q_heads: int
    block_size: int
    window: int | None = None


#: The released draft of MiMo-V2.6-Flash.
RELEASED_DRAFT = DraftShape(KVLayers(layers=5, kv_heads=8, k_dim=128, v_dim=128), q_heads=64, block_size=8, window=1024)


@dataclass(frozen=True)
class Part:
    """One line of the table. ``predicted`` or ``allocated`` is ``None`` where there is no model or no measurement;
    ``per_token`` is bytes per full token, 0 for what does not grow with tokens; ``source`` is :data:`STATIC` or
    :data:`REST`."""

    name: str
    predicted: int | None
    allocated: int | None = None
    per_token: float = 0
    source: str = STATIC
    flags: str = ""


def target_shape(config: Mapping[str, Any]) -> TargetShape:
    """The geometry in a MiMo-V2 ``config.json``.

    Raises:
        BudgetError: a key is missing, or the model has no MiMo-V2 layer pattern.
    """
    text = config.get("text_config") or config
    pattern = _need(text, "hybrid_layer_pattern", "target")
    if not isinstance(pattern, Sequence) or not set(pattern) <= {0, 1} or 0 not in pattern:
        raise BudgetError(
            f"target config.json: hybrid_layer_pattern={pattern!r}: must be a list of 0 (full) and 1 (SWA) with at "
            "least one 0; only MiMo-V2 models can be planned"
        )
    q_heads = int(_need(text, "num_attention_heads", "target"))
    kv_heads = int(_need(text, "num_key_value_heads", "target"))
    hidden = int(_need(text, "hidden_size", "target"))
    k_dim = int(text.get("head_dim") or hidden // q_heads)
    v_dim = int(text.get("v_head_dim") or k_dim)
    swa_k_dim = int(text.get("swa_head_dim") or k_dim)
    swa = KVLayers(
        layers=sum(pattern),
        kv_heads=int(text.get("swa_num_key_value_heads") or kv_heads),
        k_dim=swa_k_dim,
        v_dim=int(text.get("swa_v_head_dim") or swa_k_dim),
    )
    fused = config.get("attention_projection_layout", text.get("attention_projection_layout")) == "fused_qkv"
    return TargetShape(
        full=KVLayers(len(pattern) - swa.layers, kv_heads, k_dim, v_dim),
        swa=swa,
        q_heads=q_heads,
        window=int(_need(text, "sliding_window", "target")) if swa.layers else 0,
        vocab_size=int(_need(text, "vocab_size", "target")),
        hidden_size=hidden,
        context_length=int(_need(text, "max_position_embeddings", "target")),
        fused_tp=kv_heads if fused else None,
    )


def draft_shape(config: Mapping[str, Any]) -> DraftShape:
    """The geometry in a DFlash draft's ``config.json``.

    Raises:
        BudgetError: a key is missing.
    """
    q_heads = int(_need(config, "num_attention_heads", "draft"))
    head_dim = int(config.get("head_dim") or int(_need(config, "hidden_size", "draft")) // q_heads)
    block = (config.get("dflash_config") or {}).get("block_size") or config.get("block_size")
    if not block:
        raise BudgetError("draft config.json: block_size is missing, at the top or in dflash_config; add it")
    return DraftShape(
        KVLayers(
            layers=int(_need(config, "num_hidden_layers", "draft")),
            kv_heads=int(config.get("num_key_value_heads") or q_heads),
            k_dim=head_dim,
            v_dim=int(config.get("v_head_dim") or head_dim),
        ),
        q_heads=q_heads,
        block_size=int(block),
        window=config.get("sliding_window"),
    )


def _need(config: Mapping[str, Any], key: str, whose: str) -> Any:
    if config.get(key) is None:
        raise BudgetError(f"{whose} config.json: {key} is missing; give the {whose} model's own config.json")
    return config[key]


# ---- sizes of the parts, each as SGLang 0.5.23 allocates it -------------------------------------------------------


def pool_bytes(tokens: int, page_size: int, bytes_per_token: int) -> int:
    """A KV pool of ``tokens`` slots. One page more is allocated than is counted: padded rows write there."""
    return (tokens + page_size) * bytes_per_token


def embedding_copy_bytes(vocab_size: int, hidden_size: int, itemsize: int, attn_tp: int, attn_dp: int) -> int:
    """The draft's full embedding under DP attention. One rank per group has the whole table anyway: no copy."""
    return vocab_size * hidden_size * itemsize if attn_dp > 1 and attn_tp > 1 else 0


def request_table_bytes(requests: int, context_length: int, block_size: int, page_size: int) -> int:
    """``req_to_token``: an int32 row per request and one for padding, wider than the context by verify's reserve."""
    extra = 4 + block_size
    if page_size > 1:
        extra = max(extra, 2 * block_size + page_size - 1)
    return (requests + 1) * (context_length + extra) * _INT32


def slot_index_bytes(full_tokens: int, swa_tokens: int, page_size: int) -> int:
    """The allocators: free lists of pages, and with an SWA pool the map from full to SWA slots."""
    free = (full_tokens // page_size + swa_tokens // page_size) * _INT64
    return free + ((full_tokens + page_size + 1) * _INT64 if swa_tokens else 0)


def block_buffer_bytes(requests: int, block_size: int) -> int:
    """The worker's buffers of the draft block at a capacity of ``requests``, without those on the host."""
    return requests * (4 * block_size * _INT64 + _INT32)


def accept_buffer_bytes(requests: int, block_size: int) -> int:
    """The worker's double-buffered results of verify at a capacity of ``requests``."""
    return requests * (3 * _INT32 + 4 * _INT64 + 2 * block_size * _INT64)


def greedy_head_bytes(rows: int, attn_tp: int, itemsize: int) -> int:
    """Scratch of the eager greedy head for ``rows`` draft rows; ``itemsize`` is that of the LM head's logits."""
    if attn_tp == 1:
        return max(_HEAD_CHUNK, min(rows, _HEAD_CHUNK_ONE_RANK)) * (itemsize + _INT64)
    return _HEAD_CHUNK * ((attn_tp + 1) * (itemsize + _INT64) + 3 * _INT64)


def graph_head_bytes(requests: int, block_size: int, attn_tp: int, itemsize: int) -> int:
    """Buffers of the greedy head inside a draft graph captured for ``requests``."""
    per_row = _INT64 + ((attn_tp + 1) * (itemsize + _INT64) + 2 * _INT64 if attn_tp > 1 else 0)
    return requests * (block_size - 1) * per_row


def worker_scratch_bytes(requests: int, block_size: int, attn_tp: int, itemsize: int) -> int:
    """Most that the worker's per-step buffers take; they grow by doubling, so almost twice the largest batch."""
    capacity = max(requests, 2 * (requests - 1))
    lengths = 2 * max(capacity, _LENGTH_ROWS) * _INT32
    head = greedy_head_bytes(requests * (block_size - 1), attn_tp, itemsize)
    positions = block_size * _INT64
    return (
        block_buffer_bytes(capacity, block_size)
        + accept_buffer_bytes(capacity, block_size)
        + lengths
        + head
        + positions
    )


# ---- the whole GPU ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Deployment:
    """How a replica is served. ``requests`` is per attention group; ``draft_window`` is
    ``--speculative-draft-window-size``, with which the draft gets a request table of its own."""

    attn_tp: int
    attn_dp: int
    page_size: int
    swa_ratio: float
    requests: int
    context_length: int
    block_size: int
    kv_itemsize: int = 2
    draft_kv_itemsize: int = 2
    weight_itemsize: int = 2
    draft_window: int | None = None


def token_cost(target: TargetShape, draft: DraftShape, how: Deployment) -> dict[str, float]:
    """Bytes per token of the full pool, by part; the SWA pool has ``swa_ratio`` tokens for each of them."""
    return {
        "target KV, full layers": target.full.bytes_per_token(how.attn_tp, how.kv_itemsize),
        "target KV, SWA layers": how.swa_ratio * target.swa.bytes_per_token(how.attn_tp, how.kv_itemsize),
        "draft KV": draft.kv.bytes_per_token(how.attn_tp, how.draft_kv_itemsize),
    }


def tokens_that_fit(kv_bytes: int, target: TargetShape, draft: DraftShape, how: Deployment) -> tuple[int, int]:
    """``(full, SWA)`` pool tokens that SGLang gets out of a KV budget of ``kv_bytes``: whole pages, never negative."""
    full = int(max(kv_bytes, 0) // sum(token_cost(target, draft, how).values()))
    return whole_pages(full, target, how)


def whole_pages(full_tokens: int, target: TargetShape, how: Deployment) -> tuple[int, int]:
    """``(full, SWA)`` pool tokens for ``full_tokens``, rounded down to pages."""
    full = full_tokens // how.page_size * how.page_size
    swa = int(full * how.swa_ratio) // how.page_size * how.page_size if target.swa.layers else 0
    return full, swa


def parts(target: TargetShape, draft: DraftShape, how: Deployment, full: int, swa: int) -> list[Part]:
    """Every part but the weights, predicted, for pools of ``full`` and ``swa`` tokens."""
    cost = token_cost(target, draft, how)
    page, requests = how.page_size, how.requests
    table = request_table_bytes(requests, how.context_length, how.block_size, page)
    sizes = {
        "target KV, full layers": pool_bytes(full, page, target.full.bytes_per_token(how.attn_tp, how.kv_itemsize)),
        "target KV, SWA layers": pool_bytes(swa, page, target.swa.bytes_per_token(how.attn_tp, how.kv_itemsize)),
        "draft KV": pool_bytes(full, page, draft.kv.bytes_per_token(how.attn_tp, how.draft_kv_itemsize)),
        "full embedding copy": embedding_copy_bytes(
            target.vocab_size, target.hidden_size, how.weight_itemsize, how.attn_tp, how.attn_dp
        ),
        "request table": table,
        "draft request table": table if how.draft_window else 0,
        "slot index": slot_index_bytes(full, swa, page),
        "worker scratch": worker_scratch_bytes(requests, how.block_size, how.attn_tp, how.weight_itemsize),
    }
    return [
        Part(name, size, per_token=cost.get(name, 0), source=SOURCES[name], flags=FLAGS[name])
        for name, size in sizes.items()
    ]


SOURCES = {
    "weights": STATIC,
    "full embedding copy": STATIC,
    "target KV, full layers": STATIC,
    "target KV, SWA layers": STATIC,
    "draft KV": STATIC,
    "request table": REST,
    "draft request table": REST,
    "slot index": REST,
    "worker scratch": REST,
}

#: The flags of SGLang 0.5.23 that make a part smaller, best first.
FLAGS = {
    "weights": "more GPUs",
    "full embedding copy": "none; DP attention needs it",
    "target KV, full layers": "--kv-cache-dtype fp8_e4m3",
    "target KV, SWA layers": "--swa-full-tokens-ratio, --kv-cache-dtype fp8_e4m3",
    "draft KV": "--speculative-draft-kv-cache-dtype fp8_e4m3",
    "request table": "--max-running-requests, --context-length",
    "draft request table": "--max-running-requests, --context-length, no --speculative-draft-window-size",
    "slot index": "--max-total-tokens",
    "worker scratch": "--max-running-requests",
}


def largest(costs: Mapping[str, float]) -> str:
    """Name of the most expensive part, with the flag that makes it smaller."""
    name = max(costs, key=lambda part: costs[part])
    return f"largest part: {name}; it gets smaller with {FLAGS[name]}"


def human(size: float) -> str:
    """A byte count with three digits: ``1.16 GiB``, ``512 B``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def table_lines(title: str, lines: Sequence[Part]) -> list[str]:
    """The start-up table as text, exact bytes included, so that a log can be checked against it."""
    head = f"{'part':<24} {'predicted':>15} {'allocated':>15} {'':>11} {'B/token':>9}  memory"
    rows = [title, head]
    for part in lines:
        predicted, allocated = ("-" if size is None else str(size) for size in (part.predicted, part.allocated))
        size = human(part.predicted if part.allocated is None else part.allocated)
        token = f"{part.per_token:.0f}" if part.per_token else ""
        rows.append(f"{part.name:<24} {predicted:>15} {allocated:>15} {size:>11} {token:>9}  {part.source}")
    return rows
