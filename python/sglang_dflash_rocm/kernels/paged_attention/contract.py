"""What one compiled paged-attention kernel does, as data; and which such kernels exist."""

from __future__ import annotations

from dataclasses import dataclass

KV_DTYPES = ("bf16", "fp8_fnuz")
LAYOUTS = ("nhd", "vectorized_5d")
SINKS_DTYPES = ("float32", "bf16")
PAGE_SIZES = (16, 32, 64, 128)
# Rows of one MFMA tile, and the tiles whose accumulators fit a lane's 512 registers at V dim 128.
TILE_ROWS = 16
MAX_TILES = 8
MAX_Q_ROWS = 16


@dataclass(frozen=True)
class PagedAttentionContract:
    """One specialisation. Hashable: kernels are cached by it.

    q_heads, kv_heads: per rank. qk_dim, v_dim: elements per head. page_size: tokens. q_rows: query positions per
    request (1 for decode, the block for a verify). window: keys that a query sees, its own included, or None.
    causal: False lets every row of the block see the whole block. kv_dtype, layout: of the KV cache. split: the context
    of a request is split over several work-groups, and a second kernel reduces; into how many is said at each launch.
    sinks_dtype: how a model keeps its sinks.
    """

    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    page_size: int = 64
    q_rows: int = 1
    window: int | None = None
    sinks: bool = False
    causal: bool = True
    kv_dtype: str = "bf16"
    layout: str = "nhd"
    split: bool = False
    sinks_dtype: str = "float32"

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Rows of the score matrix of one request and KV head: every query position of every head of the group."""
        return self.q_rows * self.group

    @property
    def tiles(self) -> int:
        """16-row MFMA tiles of one request and KV head."""
        return -(-self.rows // TILE_ROWS)

    @property
    def row_splits(self) -> int:
        """Work-groups that a request and KV head take because their rows do not fit the registers of one."""
        return -(-self.tiles // MAX_TILES)

    @property
    def sinks_bytes(self) -> int:
        """Bytes of all sinks."""
        return self.q_heads * (4 if self.sinks_dtype == "float32" else 2)

    @property
    def kv_bytes(self) -> int:
        """Bytes of one cached element."""
        return 1 if self.kv_dtype == "fp8_fnuz" else 2


def supported(contract: PagedAttentionContract) -> str | None:
    """None if there is a kernel for `contract`, else the reason, naming the value and what is allowed."""
    c = contract
    checks = [
        (
            c.kv_heads > 0 and c.q_heads % max(c.kv_heads, 1) == 0,
            f"q_heads {c.q_heads} is not a multiple of kv_heads {c.kv_heads}",
        ),
        (c.qk_dim in (128, 192), f"qk_dim {c.qk_dim}; allowed: 128, 192"),
        (c.v_dim == 128, f"v_dim {c.v_dim}; allowed: 128"),
        (c.page_size in PAGE_SIZES, f"page_size {c.page_size}; allowed: {', '.join(map(str, PAGE_SIZES))}"),
        (1 <= c.q_rows <= MAX_Q_ROWS, f"q_rows {c.q_rows}; allowed: 1 to {MAX_Q_ROWS}"),
        (c.window is None or c.window >= 1, f"window {c.window}; allowed: None, or at least 1 key"),
        (c.kv_dtype in KV_DTYPES, f"kv_dtype {c.kv_dtype!r}; allowed: {', '.join(KV_DTYPES)}"),
        (c.sinks_dtype in SINKS_DTYPES, f"sinks_dtype {c.sinks_dtype!r}; allowed: {', '.join(SINKS_DTYPES)}"),
        (c.layout in LAYOUTS, f"layout {c.layout!r}; allowed: {', '.join(LAYOUTS)}"),
    ]
    for holds, reason in checks:
        if not holds:
            return reason
    if c.row_splits > 2:
        most = 2 * MAX_TILES * TILE_ROWS
        return f"{c.q_rows} query rows of {c.group} heads are {c.rows} rows per KV head; allowed: {most}"
    return None
