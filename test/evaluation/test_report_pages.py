"""Report folders and the HTML page: what they show, that it is escaped, and that a simulated run says so everywhere."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sglang_dflash_rocm.cli.main import app
from sglang_dflash_rocm.evaluation import analysis, analyze, records, report_files, report_page
from sglang_dflash_rocm.evaluation.bench_records import (
    CELLS,
    SWEEPS,
    CellRecord,
    Figures,
    Spread,
    SweepPoint,
    SweepRecord,
)

EVIL = "<script>alert('x')</script> & \"quotes\" | pipe"
LOG = """\
[2026-12-02 10:00:00 DP0 TP0] Prefill batch, #new-seq: 1, #new-token: 100, #cached-token: 0, full token usage: 0.10, \
swa token usage: 0.20, #running-req: 0, #queue-req: 2, #pending-token: 0, cuda graph: False, \
input throughput (token/s): 50.00
[2026-12-02 10:00:{a} DP0 TP0] Decode batch, #running-req: 4, #full token: 1, full token usage: 0.30, #swa token: 1, \
swa token usage: 0.40, accept len: 4.00, accept rate: 0.40, cuda graph: True, gen throughput (token/s): {speed}.00, \
#queue-req: 1
[2026-12-02 10:00:{b} DP0 TP0] Decode batch, #running-req: 4, #full token: 1, full token usage: 0.50, #swa token: 1, \
swa token usage: 0.60, accept len: 4.00, accept rate: 0.40, cuda graph: True, gen throughput (token/s): {speed}.00, \
#queue-req: 0
[2026-12-02 10:00:20] Finish: obj=X(), out={{'meta_info': {{'spec_correct_drafts_histogram': [1, 1, 2]}}}}
"""


def server_log(folder: Path, speed: int = 100) -> Path:
    file = folder / f"server-{speed}.log"
    file.write_text(LOG.format(a="05", b="10", speed=speed))
    return file


def cell(key="prefill/a", throughput=1000.0, outcome="passed", reason="", simulated=(), **changes) -> CellRecord:
    ms = Spread(mean=10.0, p50=10.0, p90=20.0, p99=30.0)
    figures = Figures(
        duration_s=1.0,
        sent=4,
        completed=4,
        input_tokens=400,
        output_tokens=4,
        request_throughput=4.0,
        input_throughput=throughput,
        output_throughput=throughput / 10,
        ttft_ms=ms,
        tpot_ms=None,
        itl_ms=None,
        e2e_ms=ms,
        ttft_missing=0,
    )
    fields = {
        "key": key,
        "outcome": outcome,
        "reason": reason,
        "provenance": records.Provenance(tool="t", started="now", versions={}, simulated=simulated),
        "phase": "prefill",
        "matrix": "prefill",
        "dataset": "random-ids",
        "input_len": 100,
        "output_len": 1,
        "range_ratio": 1.0,
        "concurrency": 2,
        "request_rate": None,
        "num_prompts": 4,
        "seed": 0,
        "command": ("python",),
        "ended": "now",
        "figures": figures if outcome == "passed" else None,
    }
    return CellRecord(**{**fields, **changes})


def sweep(rate: float | None = 4.0) -> SweepRecord:
    points = (SweepPoint(rate=4.0, measured_ms=(90.0, 95.0), ttft_ms=92.5, passed=True),)
    return SweepRecord(
        key="sweep/x",
        outcome="passed",
        provenance=records.Provenance(tool="t", started="now", versions={}),
        target_ms=100.0,
        percentile="p90",
        rate=rate,
        first_failing_rate=4.2,
        stopped="converged",
        points=points,
    )


@dataclass
class Report:
    """``make(name, cells, ...)`` writes records, and a report folder through the analyzer's command line."""

    root: Path
    made: list[str] = field(default_factory=list)

    def __call__(self, name: str, cells=(), sweeps=(), log: Path | None = None, options=()) -> Path:
        data, out = self.root / f"{name}-data", self.root / f"{name}-report"
        for file, rows in ((CELLS, cells), (SWEEPS, sweeps)):
            for row in rows:
                records.append(data / file, row)
        given = ["--records", str(data)] if data.exists() else []
        given += [str(log)] if log else []
        result = run_analyzer(*given, "--out", str(out), *options)
        assert result.exit_code == 0, result.output
        return out


def run_analyzer(*arguments: str):
    command = typer.Typer()
    command.command()(analyze.main)
    return CliRunner().invoke(command, arguments)


@pytest.fixture
def make(tmp_path) -> Report:
    return Report(tmp_path)


class Page(HTMLParser):
    """Tags and text of a page; a browser would see no others."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.images: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.images += [value for name, value in attributes if name == "src"]

    def handle_data(self, data):
        self.text += data


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_a_report_has_every_figure_of_log_and_records(make, tmp_path):
    out = make(
        "a",
        [cell(), cell("prefill/b", outcome="failed", reason="boom")],
        [sweep()],
        server_log(tmp_path),
        ["--no-plots"],
    )
    summary = {row["figure"]: row["value"] for row in rows(out / "summary.csv")}
    assert float(summary["decode throughput, all ranks (token/s)"]) == 100
    assert float(summary["decode throughput while busy, sum of ranks (token/s)"]) == 100
    assert float(summary["accept length, mean of ranks"]) == 4
    assert float(summary["queue, largest (requests)"]) == 2
    assert float(summary["SWA KV pool, largest use (share)"]) == 0.6
    assert float(summary["best input throughput of a cell (token/s)"]) == 1000
    assert float(summary["highest rate with TTFT p90 <= 100 ms (requests/s)"]) == 4
    assert [float(row["accepted (share of verify steps)"]) for row in rows(out / "positions.csv")] == [0.75, 0.5]
    (rank,) = rows(out / "ranks.csv")
    assert (rank["DP rank"], rank["full KV max"], rank["decode lines by graph"]) == ("0", "0.5", "1.0")
    assert [row["cell"] for row in rows(out / "cells.csv")] == ["prefill/a"]
    assert [row["reason"] for row in rows(out / "failed.csv")] == ["boom"]
    assert len(rows(out / "timeline.csv")) == 3
    text = (out / "report.md").read_text()
    assert "boom" in text and "1 of 2 cells did not pass" in text and "SIMULATED" not in text
    assert report_files.read(out).log.decode_per_s == 100


def test_a_simulated_run_says_so_in_every_output(make, tmp_path):
    stamps = ("fake prefill", "simulated acceptance 5.56")
    out = make("a", [cell(simulated=stamps)], log=server_log(tmp_path), options=["--no-plots"])
    told = "fake prefill, simulated acceptance 5.56"
    assert f"SIMULATED: {told}" in (out / "report.md").read_text()
    for file in out.glob("*.csv"):
        assert {row["run simulated"] for row in rows(file)} == {told.replace(", ", "; ")}, file.name
    assert report_files.read(out).simulated == stamps
    assert f"SIMULATED: {told}" in Page(report_page.page([out])).text
    by_hand = make("b", log=server_log(tmp_path), options=["--no-plots", "--simulated", "dummy weights"])
    assert report_files.read(by_hand).simulated == ("dummy weights",)


def test_plots_are_drawn_and_embedded(make, tmp_path):
    out = make("a", [cell(simulated=("fake prefill",))], [sweep()], server_log(tmp_path))
    drawn = {file.stem for file in out.glob("*.png")}
    log_plots = {"decode_throughput", "prefill_throughput", "accept_length", "queue", "running", "kv_full", "kv_swa"}
    assert drawn == log_plots | {"accept_positions", "cells_input", "cells_ttft", "sweep"}
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in out.glob("*.png"))
    page = Page(report_page.page([out]))
    assert len(page.images) == len(drawn) and all(image.startswith("data:image/png;base64,") for image in page.images)
    again = make("a", log=server_log(tmp_path), options=["--no-plots"])
    assert again == out and not list(out.glob("*.png")), "plots of an earlier report are still there"


def test_without_matplotlib_the_analyzer_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    run = run_analyzer(str(server_log(tmp_path)), "--out", str(tmp_path / "out"))
    assert run.exit_code == 1 and "--no-plots" in run.output and not (tmp_path / "out").exists()


def test_everything_from_the_data_is_escaped(make, tmp_path):
    evil = cell(f"prefill/{EVIL}", simulated=(EVIL,))
    failed = cell("prefill/b", outcome="failed", reason=EVIL, client_log=(EVIL,), server_log=(EVIL,))
    one = make("a", [evil, failed], log=server_log(tmp_path), options=["--no-plots", "--name", EVIL])
    other = make("b", [evil], options=["--no-plots", "--name", EVIL])
    for folders in ([one], [one, other]):
        page = Page(report_page.page(folders))
        assert "script" not in page.tags and page.text.count(EVIL) >= 4
    markdown = (one / "report.md").read_text()
    assert not re.search(r"(?<!\\)<script", markdown)
    table = [line for line in markdown.splitlines() if line.startswith("| prefill/b")]
    assert len(table) == 1 and len(re.findall(r"(?<!\\)\|", table[0])) == 6, "a pipe from the data made a column"


def test_two_runs_side_by_side_with_ratios(make, tmp_path):
    one = make(
        "a", [cell(throughput=1000.0), cell("prefill/only-a")], log=server_log(tmp_path, 100), options=["--no-plots"]
    )
    other = make("b", [cell(throughput=1500.0)], log=server_log(tmp_path, 250), options=["--no-plots"])
    out = tmp_path / "new" / "page.html"
    run = CliRunner().invoke(app, ["report", str(one), str(other), "--out", str(out)])
    assert run.exit_code == 0 and run.output.strip() == str(out)
    text = out.read_text()
    assert "<td>prefill/only-a</td><td>A</td>" in text

    def ratio(row: str) -> float:
        return float(re.search(rf"<tr><td>{re.escape(row)}.*?<td class=\"number\">([\d.]+)</td></tr>", text)[1])

    assert ratio("decode throughput, all ranks (token/s)") == 2.5
    assert ratio("prefill/a</td><td>input (token/s)") == 1.5
    assert ratio("prefill/a</td><td>TTFT p50 (ms)") == 1


def test_nothing_to_report_is_an_error_never_an_empty_report(tmp_path):
    (tmp_path / "empty.log").write_text("[2026-12-02 10:00:00] The server is fired up and ready to roll!\n")
    out = str(tmp_path / "out")
    run = run_analyzer(str(tmp_path / "empty.log"), "--out", out)
    assert run.exit_code == 1 and "no prefill or decode lines in" in run.output
    run = run_analyzer("--records", str(tmp_path), "--out", out)
    assert run.exit_code == 1 and "no cells.jsonl" in run.output
    assert run_analyzer("--out", out).exit_code == 2
    run = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "x.html")])
    assert run.exit_code == 1 and "analyze_server_output_throughput.py" in run.output
    assert not Path(out).exists() and not (tmp_path / "x.html").exists()


def test_the_seed_s_missing_analyzer_is_there_and_runs(tmp_path):
    """Review finding 1: the benchmark called an analyzer script that did not exist."""
    file = Path(__file__).parents[2] / "evaluation" / "analyze_server_output_throughput.py"
    run = subprocess.run(
        [sys.executable, file, server_log(tmp_path), "--out", tmp_path / "out", "--no-plots"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()).is_file()


def test_an_analysis_survives_the_disk(make, tmp_path):
    out = make("a", [cell()], [sweep(None)], server_log(tmp_path), ["--no-plots"])
    run = report_files.read(out)
    assert run.cells == (cell(),) and run.sweeps == (sweep(None),)
    assert isinstance(run, analysis.Analysis)
    (out / report_files.ANALYSIS).write_text("{}")
    with pytest.raises(report_files.ReportError, match="not an analysis"):
        report_files.read(out)
