"""``dflash-rocm fingerprints``: compare the stored fingerprints with an SGLang release, or refresh them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def fingerprints(
    write: Annotated[bool, typer.Option("--write", help="store them and rewrite docs/patches.md")] = False,
    root: Annotated[Path | None, typer.Option(help="an sglang package [default: the installed one]")] = None,
) -> None:
    """Print what changed in the functions that we hook, against what was stored. Exits 1 if anything did."""
    from sglang_dflash_rocm import compat, patches_doc

    screen = Console(soft_wrap=True, markup=False, highlight=False)
    place = root or compat.sglang_root()
    if place is None or not (place / "__init__.py").exists():
        screen.print(f"no sglang package {f'in {place}' if place else 'is installed'}: install it or give --root")
        raise typer.Exit(2)
    try:
        release, now, changes = compat.changed_fingerprints(place)
    except LookupError as error:
        screen.print(f"{error.args[0]}")
        raise typer.Exit(1) from None
    for line in changes:
        screen.print(line)
    screen.print(f"SGLang {release}: {len(now)} targets, {len(changes)} changes")
    if write:
        compat.store_fingerprints(release, now)
        page = patches_doc.page_path()
        if page is not None:
            page.write_text(patches_doc.render())
        screen.print(f"stored{f'; wrote {page.name}' if page else ''}")
    elif changes:
        raise typer.Exit(1)
