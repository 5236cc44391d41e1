"""Where built files lie: the HIP stand-in and the toolchain folder, by a hash of what they are made from."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def built(name: str, inputs: bytes, build: Callable[[Path], None]) -> Path:
    """A folder made by `build(folder)` once per content of `inputs`.

    It is under $GFX942SIM_CACHE, else $XDG_CACHE_HOME/gfx942sim, else ~/.cache/gfx942sim. Processes that build at the
    same time do not disturb each other: the folder appears whole.
    """
    root = os.environ.get("GFX942SIM_CACHE")
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gfx942sim"
    folder = base / f"{name}-{hashlib.sha256(inputs).hexdigest()[:16]}"
    if folder.exists():
        return folder
    base.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=base))
    try:
        build(work)
        work.chmod(0o755)
        try:
            work.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder
