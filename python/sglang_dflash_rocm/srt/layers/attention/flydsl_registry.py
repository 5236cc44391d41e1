"""Makes `flydsl` a value of `--attention-backend` and `--speculative-draft-attention-backend`."""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

NAME = "flydsl"


def register(extend: Callable[[object], AttentionBackend] | None = None) -> None:
    """Register the backend with SGLang, once per process.

    Args:
        extend: makes the backend that serves extend from SGLang's ModelRunner, and knows MiMo's window by itself;
            default: SGLang's Triton backend.
    """
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    if NAME in ATTENTION_BACKENDS:
        return

    @register_attention_backend(NAME)
    def create_flydsl_backend(runner):
        from .flydsl_backend import FlyDSLAttnBackend

        return FlyDSLAttnBackend(runner, (extend or _triton)(runner), window_left=extend is None)

    choices.add_attention_backend_choices([NAME])
    choices.add_draft_attention_backend_choices([NAME])


def _triton(runner: object) -> AttentionBackend:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    return TritonAttnBackend(runner)
