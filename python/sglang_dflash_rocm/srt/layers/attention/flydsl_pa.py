"""Page tables and compiled operations of the FlyDSL backend: what a forward needs besides its tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_dflash_rocm.kernels.paged_attention.contract import MAX_Q_ROWS, PAGE_SIZES, PagedAttentionContract
from sglang_dflash_rocm.kernels.paged_attention.launch import (
    PagedAttention,
    Scratch,
    UnsupportedContract,
    partitions_for,
)
from sglang_dflash_rocm.kernels.paged_attention.reference_op import ReferencePagedAttention

#: A length that stays without keys when the block is added to it.
NO_KEYS = -MAX_Q_ROWS


class PageTables:
    """The page of every 16 to 128 tokens of each request, in buffers that keep their address.

    full, sliding: int32 [max_requests, width], pages of the full pool and of the sliding-window pool (None if there is
    no such pool). seq_lens: int32 [max_requests]. requests: how many of their rows are the batch at hand. Filled on the
    device; nothing waits for it.

    Args:
        req_to_token: int32 [max_requests, max_context], SGLang's table of slots.
        translate: slots of the full pool to slots of the sliding-window pool, or None.

    Raises:
        UnsupportedContract: a page size that no kernel has.
    """

    def __init__(
        self,
        req_to_token: torch.Tensor,
        page_size: int,
        translate: Callable[[torch.Tensor], torch.Tensor] | None,
    ):
        if page_size not in PAGE_SIZES:
            allowed = ", ".join(map(str, PAGE_SIZES))
            raise UnsupportedContract(f"--attention-backend flydsl with --page-size {page_size}; allowed: {allowed}")
        self.req_to_token, self.page_size, self.translate = req_to_token, page_size, translate
        requests, context = req_to_token.shape
        device = req_to_token.device
        self.columns = torch.arange(0, context, page_size, device=device)
        shape = (requests, len(self.columns))
        self.full = torch.zeros(shape, dtype=torch.int32, device=device)
        self.sliding = None if translate is None else torch.zeros_like(self.full)
        self.seq_lens = torch.zeros(requests, dtype=torch.int32, device=device)
        self.max_context, self.requests = context, 0

    def fill(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Tables of the requests in `rows` (int64 [n]) and their lengths; row 0 is SGLang's padding and sees no key."""
        n = self.requests = len(seq_lens)
        slots = self.req_to_token[rows[:n].to(torch.int64)[:, None], self.columns]
        torch.div(slots, self.page_size, rounding_mode="floor", out=self.full[:n])
        if self.sliding is not None:
            # Entries behind a request's end are old slots or 0: no key is read through them.
            pages = self.translate(slots.flatten()).view_as(slots).clamp_(min=0) // self.page_size
            self.sliding[:n] = pages
        self.seq_lens[:n] = torch.where(rows[:n] == 0, NO_KEYS, seq_lens)


class Operations:
    """One operation per layer shape and number of query rows, and the scratch memory that they share."""

    def __init__(self, device: torch.device, max_requests: int, max_context: int):
        self.device, self.max_requests, self.max_context = device, max_requests, max_context
        self._kind = PagedAttention if device.type == "cuda" else ReferencePagedAttention
        self._known: dict[PagedAttentionContract, PagedAttention | ReferencePagedAttention] = {}
        self._scratch: Scratch | None = None
        # A captured graph knows the scratch of its time by address only: none is given back.
        self._outgrown: list[Scratch] = []

    def get(self, contract: PagedAttentionContract, requests: int):
        """(operation, partitions, scratch) of a contract for a batch; compiled now if it is new.

        Raises:
            UnsupportedContract: no kernel has this shape; the message says what is allowed.
        """
        operation = self._known.get(contract)
        if operation is None:
            operation = self._known[contract] = self._kind(contract, self.device)
            sizes = range(1, self.max_requests + 1)
            launches = [(contract, n, partitions_for(contract, n, self.max_context)) for n in sizes]
            operation.warm_up(max(partitions for _, _, partitions in launches))
            self._grow(Scratch.for_launches(launches, self.device))
        partitions = partitions_for(contract, requests, self.max_context)
        return operation, partitions, self._scratch

    def _grow(self, new: Scratch) -> None:
        """Keep the larger of the two scratch memories, part by part."""
        old = self._scratch
        if old is None:
            self._scratch = new
        elif new.out.numel() > old.out.numel() or new.lse.numel() > old.lse.numel():
            self._outgrown.append(old)
            self._scratch = Scratch(
                new.out if new.out.numel() > old.out.numel() else old.out,
                new.lse if new.lse.numel() > old.lse.numel() else old.lse,
            )
