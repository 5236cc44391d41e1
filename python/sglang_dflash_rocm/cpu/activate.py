"""Entry point of the CPU platform. Imports nothing: SGLang calls it in every process to ask whether it is on."""

from __future__ import annotations

import os

#: Name of the entry point and value of ``SGLANG_PLATFORM`` that selects the platform.
PLATFORM_NAME = "dflash_cpu"


def activate() -> str | None:
    """Dotted path of the platform class if ``SGLANG_PLATFORM=dflash_cpu``, else ``None``.

    Raises:
        RuntimeError: the platform is selected but the hooks it needs are switched off, so that it could only be wrong.
    """
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return None
    from sglang_dflash_rocm.gate import cpu_platform_blockers

    blockers = cpu_platform_blockers(os.environ)
    if blockers:
        raise RuntimeError("SGLANG_PLATFORM=dflash_cpu cannot work: " + "; ".join(blockers))
    return "sglang_dflash_rocm.cpu.platform.CpuPlatform"
