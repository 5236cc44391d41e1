"""``dflash-rocm report``: one HTML page of a report folder, or two compared. Needs no GPU, torch or SGLang."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def report(
    folder: Annotated[Path, typer.Argument(help="report folder of evaluation/analyze_server_output_throughput.py")],
    other: Annotated[Path | None, typer.Argument(help="a second one, to compare with [default: none]")] = None,
    out: Annotated[Path, typer.Option(help="HTML file to write")] = Path("report.html"),
) -> None:
    """Write a self-contained HTML page. Exits 1 if a folder is not a report."""
    from sglang_dflash_rocm.evaluation.report_files import ReportError
    from sglang_dflash_rocm.evaluation.report_page import page

    try:
        text = page([folder] if other is None else [folder, other])
    except ReportError as error:
        Console(stderr=True, soft_wrap=True, markup=False, highlight=False).print(str(error))
        raise typer.Exit(1) from None
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text)
    print(out)
