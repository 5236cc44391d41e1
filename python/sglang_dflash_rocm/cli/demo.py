"""``dflash-rocm demo``: the real server with DP attention and DFLASH on CPUs, against the plain model."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table


def demo(
    tp: Annotated[int, typer.Option(help="ranks in all")] = 4,
    dp: Annotated[int, typer.Option(help="attention groups; must divide --tp")] = 2,
    prompts: Annotated[int, typer.Option(help="prompts, each sent on both routes")] = 8,
    new_tokens: Annotated[int, typer.Option(help="tokens to generate per request")] = 48,
    timeout: Annotated[float, typer.Option(help="seconds to wait for a start or an answer")] = 300.0,
    workdir: Annotated[
        Path | None, typer.Option(help="keep models and server logs here [default: a temporary one]")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="leave the DFLASH server up until Ctrl-C")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")] = False,
) -> None:
    """Serve a tiny MiMo-V2 with DP attention and DFLASH on CPUs and compare every token with the plain model."""
    screen = Console(stderr=True)
    missing = [name for name in ("torch", "sglang", "transformers", "tokenizers") if not importlib.util.find_spec(name)]
    if missing:
        screen.print(f"[red]the demo needs {', '.join(missing)}: run `make venv`, or see the README's CPU set[/]")
        raise typer.Exit(1)

    from sglang_dflash_rocm import compat
    from sglang_dflash_rocm.cpu.torchvision_shim import import_error
    from sglang_dflash_rocm.testing.demo_run import DemoOptions, run_demo, stop_on_signals
    from sglang_dflash_rocm.testing.server import ServerError

    try:
        options = DemoOptions(tp=tp, dp=dp, prompts=prompts, new_tokens=new_tokens, timeout_s=timeout)
    except ValueError as error:
        screen.print(f"[red]{error}[/]")
        raise typer.Exit(2) from None
    if problems := compat.problems({"core", "cpu"}):
        for problem in problems:
            screen.print(f"[red]{problem}[/]")
        raise typer.Exit(1)
    if error := import_error():
        fix = f"{sys.executable} -m sglang_dflash_rocm.cpu.torchvision_shim"
        screen.print(f"[red]SGLang cannot start because torchvision does not import: {error}[/]\nTry: {fix}")
        raise typer.Exit(1)

    start = time.monotonic()
    where = workdir or Path(tempfile.mkdtemp(prefix="dflash-rocm-demo-"))
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    try:
        with stop_on_signals(), Progress(*columns, console=screen, transient=screen.is_terminal) as bar:
            report = run_demo(options, where, _Ticker(bar, screen), _hold(bar, screen) if keep else None)
    except ServerError as error:
        screen.print(str(error), style="red", markup=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        screen.print("stopped; no process is left")
        raise typer.Exit(130) from None
    report.seconds["total"] = time.monotonic() - start
    if report.ok and workdir is None:
        shutil.rmtree(where, ignore_errors=True)

    if as_json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        _show(report, Console())
    raise typer.Exit(0 if report.ok else 1)


class _Ticker:
    """Shows ``run_demo``'s progress: a bar on a terminal, one line per stage and per 10 s elsewhere."""

    def __init__(self, bar: Progress, screen: Console) -> None:
        self.bar, self.screen = bar, screen
        self.task = bar.add_task("", total=None)
        self.stage, self.printed = "", 0.0

    def __call__(self, stage: str, done: int, total: int, detail: str) -> None:
        if stage != self.stage:
            self.bar.reset(self.task)
        self.bar.update(self.task, description=stage, completed=done, total=total or None)
        if not self.screen.is_terminal and (stage != self.stage or time.monotonic() - self.printed > 10):
            self.printed = time.monotonic()
            self.screen.print(f"{stage}{f' ({done} of {total})' if total else ''}  {detail[:90]}", markup=False)
        self.stage = stage


def _hold(bar: Progress, screen: Console):
    def hold(server, report) -> None:
        bar.stop()
        _show(report, screen)
        screen.print(f"\nThe DFLASH server stays up at {server.url} until Ctrl-C. The same by hand:", markup=False)
        screen.print(server.shell_line(), markup=False, soft_wrap=True)
        try:
            while server.alive():
                time.sleep(0.5)
        except KeyboardInterrupt:
            return
        raise server.failure("the server ended by itself")

    return hold


def _show(report, out: Console) -> None:
    title = f"tiny MiMo-V2 + DFLASH on CPUs, TP{report.options.tp} / DP{report.options.dp}, float32"
    table = Table(title=title, title_justify="left", caption="steps: verify steps", caption_justify="left")
    for name in ("prompt", "route", "DP rank", "in", "out", "equal", "accept length", "steps"):
        table.add_column(name, justify="left" if name == "route" else "right", no_wrap=True)
    for row in sorted(report.rows, key=lambda row: (row.prompt, row.route)):
        table.add_row(
            str(row.prompt),
            row.route.removesuffix("/completions"),
            str(row.dp_rank),
            str(row.prompt_tokens),
            str(len(row.tokens)),
            "[green]yes[/]" if row.equal else "[red]NO[/]",
            f"{row.accept_length:.2f}",
            str(row.verify_steps),
        )
    out.print(table)
    for rank, mean in report.rank_means().items():
        out.print(
            f"DP rank {rank}: mean accept length {mean['mean_accept_length']:.2f} over {mean['requests']} requests "
            f"({mean['tokens']} tokens in {mean['verify_steps']} verify steps)"
        )
    out.print(f"{report.equal_prompts} of {report.options.prompts} prompts equal to target-only on both routes")
    if report.plugin_line:
        out.print(report.plugin_line, markup=False)
    spent = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in report.seconds.items())
    out.print(f"time: {spent}")
    for problem in report.problems:
        out.print(f"PROBLEM {problem}", style="red", markup=False)
    if report.problems:
        out.print(f"server logs: {', '.join(report.logs)}", markup=False)
