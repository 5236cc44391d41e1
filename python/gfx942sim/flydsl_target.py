"""What FlyDSL needs to compile for gfx942 on a machine without ROCm: a linker and AMD's device libraries.

Both come from the Triton wheel, which links in lld and ships the `.bc` files.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from .cache import built
from .errors import SimulationError

# FlyDSL calls `ld.lld ... -o OUT IN`; Triton has the same lld as a library function.
_LINKER = """#!{python}
import sys
from triton._C.libtriton import amd
words = sys.argv[1:]
out = words[words.index("-o") + 1]
objects = [w for i, w in enumerate(words) if not w.startswith("-") and words[i - 1] != "-o"]
if len(objects) != 1:
    sys.exit(f"ld.lld of gfx942sim links one object, got {{objects}}")
amd.link_hsaco(objects[0], out)
"""


def rocm_root() -> Path:
    """A folder laid out like a ROCm installation, as far as FlyDSL looks.

    Raises:
        SimulationError: Triton is not installed, or its wheel has no AMD backend.
    """
    found = importlib.util.find_spec("triton")
    if found is None or not found.submodule_search_locations:
        raise SimulationError("FlyDSL needs a linker to compile: install triton, whose wheel has one")
    libraries = Path(found.submodule_search_locations[0]) / "backends" / "amd" / "lib"
    if not libraries.is_dir():
        raise SimulationError(f"this triton has no AMD backend ({libraries} is missing)")
    script = _LINKER.format(python=sys.executable)

    def build(folder: Path) -> None:
        linker = folder / "llvm" / "bin" / "ld.lld"
        linker.parent.mkdir(parents=True)
        linker.write_text(script)
        linker.chmod(0o755)
        (folder / "amdgcn").mkdir()
        (folder / "amdgcn" / "bitcode").symlink_to(libraries)

    return built("rocm", script.encode() + str(libraries).encode(), build)


def prepare() -> None:
    """Set up this process for FlyDSL on the simulator. Call before flydsl is imported.

    Sets FLYDSL_GPU_ARCH and ROCM_PATH (unless ROCM_PATH names a usable installation) and loads the HIP stand-in.
    """
    from . import hip_runtime

    os.environ["FLYDSL_GPU_ARCH"] = "gfx942"
    given = os.environ.get("ROCM_PATH")
    if not given or not (Path(given) / "llvm" / "bin" / "ld.lld").exists():
        os.environ["ROCM_PATH"] = str(rocm_root())
    hip_runtime.load()
