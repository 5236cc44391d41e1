"""Makes `flydsl` a value of `--attention-backend` (and of the draft's), and takes over `aiter` where asked to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_dflash_rocm import environ

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

NAME, AITER = "flydsl", "aiter"


def names() -> tuple[str, ...]:
    """Values of `--attention-backend` that give our backend."""
    return (NAME, AITER) if environ.SGLANG_AITER_PA_DECODE_IMPL.get() == NAME else (NAME,)


def register(extend: Callable[[object], AttentionBackend] | None = None) -> None:
    """Register the backend with SGLang under its `names`, once per process.

    Args:
        extend: makes the backend that serves extend from SGLang's ModelRunner, and knows MiMo's window by itself;
            default: SGLang's Triton backend.
    """
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    if NAME in ATTENTION_BACKENDS:
        return

    def create_flydsl_backend(runner):
        from .flydsl_backend import FlyDSLAttnBackend

        return FlyDSLAttnBackend(runner, (extend or _triton)(runner))

    for name in names():
        ATTENTION_BACKENDS[name] = create_flydsl_backend
    choices.add_attention_backend_choices([NAME])
    # SGLang's own aiter is no choice for a draft.
    choices.add_draft_attention_backend_choices(list(names()))


def _triton(runner: object) -> AttentionBackend:
    from .triton_extend import TritonExtend

    return TritonExtend(runner)
