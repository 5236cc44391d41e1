"""``dflash-rocm check``: does this environment have what a server with the given flags needs of us?"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

_COLOURS = {"ok": "green", "applied": "green", "active": "green", "changed": "red", "missing": "red", "refused": "red"}


def check(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")] = False,
    live: Annotated[bool, typer.Option(help="also run SGLang's plugin loader, about 10 s")] = True,
    model: Annotated[Path | None, typer.Option(help="a MiMo-V2 checkpoint to look at: files, sizes, TP")] = None,
    draft_model: Annotated[Path | None, typer.Option(help="its DFlash draft; needs --model")] = None,
) -> None:
    """Versions, hooks, features, checkpoint. Server flags go after `--`. Exits 0 if all is well, 1 if not."""
    from sglang_dflash_rocm.doctor import examine

    if draft_model is not None and model is None:
        raise typer.BadParameter("is compared with the target: give --model as well", param_hint="--draft-model")
    findings = examine(os.environ, context.args, live, model, draft_model)
    if as_json:
        print(json.dumps(findings.as_json(), indent=1))
    else:
        _show(findings, Console())
    raise typer.Exit(0 if findings.ok else 1)


def _show(findings, out: Console) -> None:
    out.print("  ".join(f"{name} {value}" for name, value in findings.versions.items()), highlight=False)
    table = Table()
    table.add_column("hook", overflow="fold")
    for name in ("kind", "group", "source", "live"):
        table.add_column(name)
    for row in findings.hooks:
        marks = [f"[{_COLOURS.get(row[key], 'default')}]{row[key]}[/]" for key in ("static", "live")]
        table.add_row(row["target"].removeprefix("sglang."), row["kind"], row["group"], *marks)
    out.print(table)
    for feature in findings.features:
        colour = _COLOURS.get(feature["state"], "yellow")
        out.print(f"[{colour}]{feature['state']}[/] {feature['feature']} ({feature['by']}) {feature['note']}")
    if not findings.features:
        out.print("nothing of this package is asked for; a server would run as if it were not installed")
    for note in findings.notes:
        out.print(f"note: {note}", markup=False)
    for problem in findings.problems:
        out.print(f"PROBLEM {problem}", style="red", markup=False, soft_wrap=True)
