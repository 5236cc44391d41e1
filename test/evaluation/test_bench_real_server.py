"""The benchmarks as a user runs them: a real SGLang server on the CPU platform, SGLang's own client, analyzer, page."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

import sglang_dflash_rocm
from sglang_dflash_rocm.cli.main import app
from sglang_dflash_rocm.evaluation import records, report_files
from sglang_dflash_rocm.evaluation.bench_records import CELLS, SWEEPS, CellRecord, SweepRecord
from sglang_dflash_rocm.testing.client import generate_many
from sglang_dflash_rocm.testing.server import Server, ServerConfig
from sglang_dflash_rocm.testing.tiny_models import TinyModels, build_tiny_models, tiny_prompts

#: A server and each client import SGLang anew, which takes longer than the tests do.
pytestmark = [pytest.mark.slow, pytest.mark.server]
SCRIPTS = Path(__file__).parents[2] / "evaluation"
#: A decode line every fourth step, finished requests with their histograms, times in ms.
TALKATIVE = ("--decode-log-interval", "4", "--log-requests", "--log-requests-level", "0")
ENV = {"SGLANG_LOG_MS": "1"}
FAKE_PREFILL = (
    *("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake"),
    # The default keeps a pinned host copy of the KV pool, which needs CUDA or HIP.
    *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
)
TWO_CELLS = {"INPUT_LENS": "32,64", "CONCURRENCIES": "2", "NUM_PROMPTS": "4"}
SIMULATED = 4.0


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> TinyModels:
    return build_tiny_models(tmp_path_factory.mktemp("models"))


def start(config: ServerConfig, folder: Path) -> Server:
    server = Server(config, folder / "server.log")
    server.start()
    try:
        server.wait_ready(240)
    except BaseException:
        server.stop()
        raise
    return server


def environment(server: Server, folder: Path, **settings: str) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sglang_dflash_rocm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    ours = {"BASE_URL": server.url, "OUT_DIR": str(folder), "SERVER_LOG": str(server.log), "PYTHON": sys.executable}
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), **offline, **ours, **settings}


def script(name: str, server: Server, folder: Path, **settings: str) -> subprocess.CompletedProcess:
    env = environment(server, folder, **settings)
    return subprocess.run([SCRIPTS / name], env=env, capture_output=True, text=True, timeout=280)


def analyze(server: Server, data: Path, out: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, SCRIPTS / "analyze_server_output_throughput.py", server.log, "--records", data]
    return subprocess.run([*command, "--out", out, *_plots()], capture_output=True, text=True, timeout=60)


def _plots() -> list[str]:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return ["--no-plots"]
    return []


def cells(folder: Path) -> list[CellRecord]:
    return records.read(folder / CELLS, CellRecord)


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def check_prefill_cell(cell: CellRecord, length: int) -> None:
    assert (cell.outcome, cell.input_len) == ("passed", length)
    assert cell.figures.input_tokens == 4 * length and cell.figures.output_tokens == 4
    assert 0 < cell.figures.ttft_ms.p50 <= cell.figures.ttft_ms.p99
    assert cell.provenance.server["speculative_algorithm"] == "DFLASH" and not cell.provenance.simulated


def prefilled(report: Path) -> int:
    """Prompt tokens in the log, computed or cached, without SGLang's health checks, which are prompts of one token."""
    lines = [row for row in rows(report / "timeline.csv") if row["kind"] == "prefill" and int(row["new_tokens"]) > 1]
    return sum(int(row["new_tokens"]) + int(row["cached_tokens"]) for row in lines)


def test_prefill_matrix_analysis_and_page(models, tmp_path):
    """What the client measured, what the server logged and what the report says agree."""
    config = ServerConfig(models.target, models.draft, extra=TALKATIVE, env=ENV)
    with start(config, tmp_path) as server:
        run = script("benchmark_sglang_prefill.sh", server, tmp_path / "data", **TWO_CELLS)
        assert run.returncode == 0, run.stderr
        answers = generate_many(server.url, tiny_prompts(4), [40] * 4)
        refused = script("run_benchmark_mimo_decode.sh", server, tmp_path / "none")
        assert refused.returncode == 2 and "needs a fake-prefill server" in refused.stderr
    measured = cells(tmp_path / "data")
    for cell, length in zip(measured, (32, 64), strict=True):
        check_prefill_cell(cell, length)

    made = analyze(server, tmp_path / "data", tmp_path / "report")
    assert made.returncode == 0, made.stderr
    report = report_files.read(tmp_path / "report")
    (rank,) = report.log.ranks
    # Four requests and the warm-up's in each cell, then the four prompts.
    assert prefilled(tmp_path / "report") == 5 * 32 + 5 * 64 + sum(map(len, tiny_prompts(4)))
    assert report.log.unread_lines == 0 and report.log.time_resolution_s == 0.001
    assert rank.decode.per_s > 0 and rank.full_usage.peak > 0 and rank.swa_usage.peak > 0
    accepted, steps = sum(a.accepted for a in answers), sum(a.verify_steps for a in answers)
    assert sum(report.log.positions) == pytest.approx(accepted / steps, rel=0.02)
    # The log's decode lines leave out what came after the last of them.
    assert report.log.accept_length_all == pytest.approx(1 + accepted / steps, rel=0.25)

    page = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path / "report"), "--out", str(page)])
    assert result.exit_code == 0, result.output
    assert all(cell.key in page.read_text() for cell in measured)


def test_dp_ranks_of_a_real_log(models, tmp_path):
    """Both DP ranks are in the report, and no batch of an attention-TP peer is counted twice."""
    config = ServerConfig(models.target, models.draft, tp=4, dp=2, extra=TALKATIVE, env=ENV)
    prompts = tiny_prompts(8)
    with start(config, tmp_path) as server:
        for rank in (0, 1):
            generate_many(server.url, prompts, [40] * 8, dp_rank=rank)
        run = script("run_benchmark_mimo_pro_prefill.sh", server, tmp_path / "data", **TWO_CELLS)
        assert run.returncode == 0, run.stderr
    for cell, length in zip(cells(tmp_path / "data"), (32, 64), strict=True):
        check_prefill_cell(cell, length)
    made = analyze(server, tmp_path / "data", tmp_path / "report")
    assert made.returncode == 0, made.stderr
    ranks = {rank.dp_rank: rank for rank in report_files.read(tmp_path / "report").log.ranks}
    assert set(ranks) == {0, 1} and all(rank.decode_lines > 1 for rank in ranks.values())
    assert prefilled(tmp_path / "report") == 2 * sum(map(len, prompts)) + 5 * 32 + 5 * 64


def test_sweep_on_a_real_server(models, tmp_path):
    config = ServerConfig(models.target, models.draft)
    settings = {"DURATION_S": "2", "INPUT_LEN": "32", "START_RATE": "4", "MIN_RATE": "4", "MAX_RATE": "8"}
    with start(config, tmp_path) as server:
        run = script("bench_sglang_prefill_sweep.sh", server, tmp_path / "data", TARGET_TTFT_MS="60000", **settings)
    assert run.returncode == 0, run.stderr
    (found,) = records.read(tmp_path / "data" / SWEEPS, SweepRecord)
    assert (found.rate, found.stopped) == (8.0, "highest rate keeps the target")
    assert [cell.num_prompts for cell in cells(tmp_path / "data")] == [16, 16]


def test_interrupted_with_the_real_client_and_resumed(models, tmp_path):
    data = tmp_path / "data"
    settings = {**TWO_CELLS, "NUM_PROMPTS": "16", "CONCURRENCIES": "1"}
    with start(ServerConfig(models.target, models.draft), tmp_path) as server:
        command = [SCRIPTS / "benchmark_sglang_prefill.sh"]
        run = subprocess.Popen(command, env=environment(server, data, **settings), stderr=subprocess.PIPE, text=True)
        try:
            _wait(lambda: len(cells(data)) == 1 and _clients(run.pid), 120)
            (client,) = _clients(run.pid)
            run.send_signal(signal.SIGINT)
            run.communicate(timeout=30)
        finally:
            run.kill()
        assert run.returncode == 130 and not client.is_running()
        again = script("benchmark_sglang_prefill.sh", server, data, **settings)
        assert again.returncode == 0, again.stderr
    assert [cell.outcome for cell in cells(data)] == ["passed", "interrupted", "passed"]


def test_a_real_server_that_dies_in_a_cell(models, tmp_path):
    data = tmp_path / "data"
    settings = {"INPUT_LENS": "400", "CONCURRENCIES": "1,2,4", "NUM_PROMPTS": "500"}
    with start(ServerConfig(models.target, models.draft), tmp_path) as server:
        command = [SCRIPTS / "benchmark_sglang_prefill.sh"]
        run = subprocess.Popen(command, env=environment(server, data, **settings), stderr=subprocess.PIPE, text=True)
        try:
            _wait(lambda: "#new-token: 400" in server.log_text(), 120)
            server.stop()
            killed = time.monotonic()
            _, errors = run.communicate(timeout=60)
        finally:
            run.kill()
        assert run.returncode == 1 and time.monotonic() - killed < 45, errors
    first, *others = cells(data)
    assert first.outcome == "failed" and re.search("is gone|went away", first.reason)
    assert any("Prefill batch" in line for line in first.server_log) and first.client_log
    assert len(others) == 2 and all("not run: nothing listens" in cell.reason for cell in others)


def test_decode_with_fake_prefill_and_simulated_acceptance(models, tmp_path):
    extra = (*FAKE_PREFILL, *TALKATIVE)
    simulate = {"SGLANG_SIMULATE_ACC_LEN": str(SIMULATED), "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}
    config = ServerConfig(models.target, models.draft, extra=extra, env={**ENV, **simulate})
    settings = {**TWO_CELLS, "OUTPUT_LEN": "48", "SGLANG_SIMULATE_ACC_LEN": str(SIMULATED)}
    with start(config, tmp_path) as server:
        run = script("run_benchmark_mimo_decode.sh", server, tmp_path / "data", **settings)
        assert run.returncode == 0, run.stderr
        refused = script("benchmark_sglang_prefill.sh", server, tmp_path / "none")
        assert refused.returncode == 2 and "computes no prefill" in refused.stderr
    for cell in cells(tmp_path / "data"):
        assert cell.provenance.simulated == ("fake prefill", f"simulated acceptance {SIMULATED:g}")
        assert cell.figures.output_tokens == 4 * 48
        assert cell.accept_lengths[0] == pytest.approx(SIMULATED, rel=0.1)
    made = analyze(server, tmp_path / "data", tmp_path / "report")
    assert made.returncode == 0 and "SIMULATED" in made.stderr
    log = report_files.read(tmp_path / "report").log
    assert log.ranks[0].prefill_lines == 0 and log.accept_length_all == pytest.approx(SIMULATED, rel=0.1)


def _clients(parent: int) -> list[psutil.Process]:
    return [p for p in psutil.Process(parent).children() if "sglang.benchmark.serving" in " ".join(p.cmdline())]


def _wait(done, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.1)
