"""The interface of launch.PagedAttention over the float reference: what runs where there is no gfx942 GPU."""

from __future__ import annotations

import torch

from ..kv_cache.layout import linear
from .contract import PagedAttentionContract, supported
from .launch import Scratch, UnsupportedContract
from .reference import paged_attention


class ReferencePagedAttention:
    """The same call on any device and in any float type, without kernels, graphs or scratch. It reads host copies.

    Args:
        contract: must be one that a kernel exists for, so that a CPU run refuses what a GPU would.

    Raises:
        UnsupportedContract: no kernel serves it.
    """

    def __init__(self, contract: PagedAttentionContract, device: torch.device | str):
        reason = supported(contract)
        if reason is not None:
            raise UnsupportedContract(f"paged attention on gfx942: {reason}")
        self.contract = contract

    def warm_up(self, most_partitions: int) -> None:
        """Nothing to compile."""

    def __call__(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float,
        scratch: Scratch | None = None,
        partitions: int = 1,
        extra: int | None = None,
        sinks: torch.Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> torch.Tensor:
        """As launch.PagedAttention; `scratch` and `partitions` have no meaning here."""
        c = self.contract
        kv_lens = seq_lens + (c.q_rows if extra is None else extra)
        live = (kv_lens > 0).nonzero().flatten()  # the others see no key: 0
        offsets = torch.arange(c.page_size, device=page_table.device)
        slots = []
        for row, kv_len in zip(page_table[live], kv_lens[live].tolist(), strict=True):
            pages = row[: -(-kv_len // c.page_size)].to(torch.int64)
            slots.append((pages[:, None] * c.page_size + offsets).flatten()[:kv_len])
        result, _ = paged_attention(
            q.unflatten(0, (-1, c.q_rows))[live].flatten(0, 1),
            *linear(k_cache, v_cache, slots, c.page_size),
            [c.q_rows] * len(slots),
            scale=scale * k_scale,
            window_keys=c.window,
            causal=c.causal,
            sinks=sinks,
        )
        out.zero_().unflatten(0, (-1, c.q_rows))[live] = (result * v_scale).to(out.dtype).unflatten(0, (-1, c.q_rows))
        return out
