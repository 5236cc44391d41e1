"""Let a torchvision wheel import beside a torch build that cannot load its compiled operators.

SGLang imports ``torchvision.transforms`` in every process. The wheels on the usual index are built for CUDA; beside a
CPU torch their operator library does not load, and torchvision then fails in ``_meta_registrations`` on an operator
that was never defined. The transforms need none of those operators. No plugin entry point runs early enough to help
(SGLang imports torchvision first), so this is a ``.pth`` file of the virtual environment, written once and only where
it is needed: ``python -m sglang_dflash_rocm.cpu.torchvision_shim``.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

PTH_NAME = "sglang_dflash_rocm_torchvision.pth"
_MODULE = "torchvision._meta_registrations"
_PTH_LINE = f"import sys, types; sys.modules.setdefault({_MODULE!r}, types.ModuleType({_MODULE!r}))\n"
_SYMPTOM = "operator torchvision::nms does not exist"


def import_error() -> str:
    """Import torchvision in a fresh process; the last line of its error, or an empty string."""
    run = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True)
    return "" if run.returncode == 0 else (run.stderr.strip().splitlines() or ["no message"])[-1]


def install(site_packages: Path | None = None) -> str:
    """Write the ``.pth`` file if torchvision needs it; returns a sentence saying what was done.

    Raises:
        RuntimeError: torchvision does not import for another reason, or still does not import afterwards.
    """
    error = import_error()
    if not error:
        return "torchvision imports as it is"
    if _SYMPTOM not in error:
        raise RuntimeError(f"torchvision does not import, and not for want of its operators: {error}")
    target = (site_packages or Path(sysconfig.get_paths()["purelib"])) / PTH_NAME
    target.write_text(_PTH_LINE)
    error = import_error()
    if error:
        target.unlink()
        raise RuntimeError(f"torchvision still does not import: {error}")
    return f"torchvision's operators do not fit this torch; wrote {target.name} so that its transforms import"


if __name__ == "__main__":
    try:
        print(install())
    except RuntimeError as failure:
        sys.exit(f"torchvision_shim: {failure}")
