"""Entry point of the CPU platform. SGLang asks it in every process, so it imports next to nothing."""

from __future__ import annotations

import os

from sglang_dflash_rocm.gate import PLATFORM_NAME, cpu_platform_blockers


def activate() -> str | None:
    """Dotted path of the platform class if ``SGLANG_PLATFORM=dflash_cpu``, else ``None``.

    Raises:
        RuntimeError: the platform is selected but the hooks it needs are switched off, so that it could only be wrong.
    """
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return None
    blockers = cpu_platform_blockers(os.environ)
    if blockers:
        raise RuntimeError("SGLANG_PLATFORM=dflash_cpu cannot work: " + "; ".join(blockers))
    return "sglang_dflash_rocm.cpu.platform.CpuPlatform"
