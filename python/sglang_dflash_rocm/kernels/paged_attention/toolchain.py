"""The FlyDSL that compiles our kernels: which versions, and what a compiled kernel is known by."""

from __future__ import annotations

import functools
import hashlib
from importlib import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet

#: Versions whose code objects were run on the simulator: 0.3.1 (what aiter pinned in August 2026), 0.4.2, 0.5.0.
VERSIONS = SpecifierSet(">=0.3.1,<0.6")
_FIX = "pip install --no-deps flydsl==0.5.0"


class UnsupportedFlyDSL(RuntimeError):
    """FlyDSL is missing, or is a version that our kernels were never compiled with."""


def check_flydsl(version: str | None = None) -> None:
    """Raise UnsupportedFlyDSL unless the installed FlyDSL (or `version`) is one of VERSIONS."""
    try:
        version = version or metadata.version("flydsl")
    except metadata.PackageNotFoundError:
        raise UnsupportedFlyDSL(
            f"the attention kernels need flydsl{VERSIONS}: pip install --no-deps flydsl==0.5.0"
        ) from None
    if not VERSIONS.contains(version, prereleases=True):
        raise UnsupportedFlyDSL(
            f"flydsl {version} is installed; the attention kernels were compiled and checked with {VERSIONS}: {_FIX}"
        )


@functools.cache
def sources_digest() -> str:
    """Hash of the sources that kernels of this folder are made from."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def identity(contract: object) -> str:
    """What FlyDSL's caches must know a kernel by.

    Up to 0.4 they are keyed by the kernel function's own source and the scalars in its closure, not by what it calls
    or by objects like a contract: without this string in the closure, one shape would be given another's code.
    """
    return f"{contract!r} {sources_digest()}"
