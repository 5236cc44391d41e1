"""Copies of the installed SGLang with one file changed, made of links so that they cost nothing."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_dflash_rocm import compat


def doctored_copy(parent: Path, relative: str | None, pattern: str = "", replacement: str = "") -> Path:
    """A directory to put first on PYTHONPATH, with ``sglang/`` in it; returns ``sglang/`` itself.

    Args:
        parent: an empty directory.
        relative: file below ``sglang/`` to change; the rest is linked.
        pattern, replacement: ``re.sub`` on that file, which must match. An empty pattern removes the file.
    """
    real = compat.sglang_root()
    copy = parent / "sglang"
    _link(real, copy)
    if relative is None:
        return copy
    for folder in reversed(list(Path(relative).parents)[:-1]):
        (copy / folder).unlink()
        _link(real / folder, copy / folder)
    target = copy / relative
    target.unlink()
    if pattern:
        text, changes = re.subn(pattern, replacement, (real / relative).read_text())
        assert changes, f"{pattern!r} does not occur in {relative}"
        target.write_text(text)
    return copy


def _link(real: Path, copy: Path) -> None:
    copy.mkdir()
    for child in real.iterdir():
        if child.name != "__pycache__":
            (copy / child.name).symlink_to(child)
