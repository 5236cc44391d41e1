"""Which attention backend a server gets that names none, and the page size that our backend needs."""

from __future__ import annotations

import logging
from typing import Any

from sglang_dflash_rocm import gate
from sglang_dflash_rocm.checkpoint import TARGETS
from sglang_dflash_rocm.kernels.paged_attention.toolchain import UnsupportedFlyDSL, check_flydsl
from sglang_dflash_rocm.srt.layers.attention import flydsl_registry

logger = logging.getLogger(__name__)

PAGE_SIZE = 64


def choose_backend(server_args: Any) -> None:
    """BEFORE `handle_attention_backend_compatibility`, in the launcher.

    MiMo-V2 on gfx942 without any backend flag: `flydsl`, because SGLang's choice there, aiter, is wrong for its heads;
    `triton` if FlyDSL is missing. Our backend without `--page-size`: 64, because there is no kernel for SGLang's 1.

    Raises:
        SystemExit: our backend is asked for on gfx942, and the installed FlyDSL cannot compile its kernels.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolved_view

    view = resolved_view(server_args)
    chosen = {view.attention_backend, view.prefill_attention_backend, view.decode_attention_backend} - {None}
    on_gfx942 = view.device == "cuda" and gate.gfx942_present()
    fault = _flydsl_fault() if on_gfx942 else None
    if (
        not chosen
        and on_gfx942
        and set(TARGETS).intersection(model_config_of(server_args).hf_config.architectures or ())
    ):
        backend = flydsl_registry.NAME if fault is None else "triton"
        chosen = {backend}
        declare_resolution(server_args, "sglang_dflash_rocm", attention_backend=backend)
        logger.info(
            "sglang-dflash-rocm: attention backend %s, because aiter is wrong for the 192/128 heads of MiMo-V2 on "
            "gfx942%s; --attention-backend chooses another one",
            backend,
            " (flydsl ran on a simulator, not on a GPU so far)" if fault is None else f" and flydsl is out: {fault}",
        )
    if not chosen.intersection(flydsl_registry.names()):
        return
    if fault is not None:
        gate.stop([f"--attention-backend {', '.join(sorted(chosen))}: {fault}, or use --attention-backend triton"])
    if view.page_size is None:
        declare_resolution(server_args, "sglang_dflash_rocm", page_size=PAGE_SIZE)
        logger.info("sglang-dflash-rocm: --page-size %d, the default of the flydsl attention backend", PAGE_SIZE)


def _flydsl_fault() -> str | None:
    try:
        check_flydsl()
    except UnsupportedFlyDSL as error:
        return str(error)
    return None
