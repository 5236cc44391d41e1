"""Benchmark matrices: settings, refusals, failed and interrupted cells, resume. The client is a stub here; the real one
and a real server are in ``test_bench_real_server.py``."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from bench_stubs import FAKE_PREFILL, REAL, StubServer, result

import sglang_dflash_rocm
from sglang_dflash_rocm.evaluation import bench_client, bench_server, bench_settings, records, server_info, variables
from sglang_dflash_rocm.evaluation.bench_client import CellFailed
from sglang_dflash_rocm.evaluation.bench_records import CELLS, SWEEPS, CellRecord, SweepRecord, percentile

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "benchmark_sglang_prefill.sh": 16,
    "run_benchmark_mimo_pro_prefill.sh": 32,
    "run_benchmark_mimo_decode.sh": 12,
    "bench_sglang_prefill_sweep.sh": 1,
}
TWO_CELLS = {"INPUT_LENS": "32", "CONCURRENCIES": "1,2", "NUM_PROMPTS": "4"}


def environment(**settings: str) -> dict[str, str]:
    """The caller's environment without variables of ours, but with ``settings``."""
    ours = {
        variable.name
        for table in (bench_settings.MIMO_PREFILL, bench_settings.DECODE, bench_settings.SWEEP)
        for variable in table
    }
    path = os.pathsep.join([str(Path(sglang_dflash_rocm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {**kept, "PYTHON": sys.executable, "PYTHONPATH": path.rstrip(os.pathsep), **settings}


def script(name: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [ROOT / "evaluation" / name, *arguments],
        env=environment(**settings),
        capture_output=True,
        text=True,
        timeout=60,
    )


def stub_run(*words: str, **settings: str) -> subprocess.CompletedProcess:
    """``matrix KIND`` or ``sweep``, the real command with the stub client."""
    command = [sys.executable, Path(__file__).with_name("bench_stubs.py"), *words]
    return subprocess.run(command, env=environment(**settings), capture_output=True, text=True, timeout=60)


def cells(folder: Path) -> list[CellRecord]:
    return records.read(folder / CELLS, CellRecord)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_dry_run_prints_every_command_and_touches_nothing(name, tmp_path):
    run = script(name, DRY_RUN="1", TARGET_TTFT_MS="100", OUT_DIR=str(tmp_path / "out"))
    assert run.returncode == 0, run.stderr
    lines = [shlex.split(line) for line in run.stdout.splitlines()]
    assert len(lines) == SCRIPTS[name] == len({tuple(line) for line in lines})
    assert all(line[0] == "PYTHONUNBUFFERED=1" and line[2:4] == ["-m", "sglang.benchmark.serving"] for line in lines)
    assert ("--fake-prefill" in lines[0]) == ("decode" in name)
    assert not (tmp_path / "out").exists()


def test_the_real_client_takes_every_command(tmp_path):
    """Each flag by SGLang's own parser, and its meaning: the values come back."""
    data = tmp_path / "own.jsonl"
    data.write_text("{}\n")
    commands = []
    for name in SCRIPTS:
        run = script(
            name, DRY_RUN="1", TARGET_TTFT_MS="100", TOKENIZER="some/tokenizer", EXTRA_CLIENT_ARGS="--top-p 0.9"
        )
        commands += run.stdout.splitlines()[:1]
    own = {"DATASET_NAME": "custom", "DATASET_PATH": str(data)}
    commands += script("run_benchmark_mimo_pro_prefill.sh", DRY_RUN="1", **own).stdout.splitlines()[:1]
    commands += script("run_benchmark_mimo_decode.sh", DRY_RUN="1", **own).stdout.splitlines()[:1]
    code = (
        "import json, shlex, sys\nfrom sglang.benchmark import serving\nout = []\n"
        "serving.run_benchmark = lambda args: out.append({k: repr(v) for k, v in vars(args).items()})\n"
        "for line in sys.stdin:\n    sys.argv = ['serving', *shlex.split(line)[4:]]\n    serving.cli_main()\n"
        "print('RESULT', json.dumps(out))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        input="\n".join(commands),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    parsed = json.loads(run.stdout.split("RESULT ")[1])
    prefill, mimo, decode, sweep, custom, custom_decode = parsed
    assert (prefill["random_input_len"], prefill["random_output_len"], prefill["max_concurrency"]) == ("1024", "1", "1")
    assert prefill["random_range_ratio"] == "1.0" and prefill["tokenize_prompt"] == "True" == prefill["flush_cache"]
    assert mimo["top_p"] == "0.9" and mimo["tokenizer"] == "'some/tokenizer'"
    assert decode["fake_prefill"] == "True" and decode["random_output_len"] == "1024"
    assert sweep["request_rate"] == "1.0" and sweep["max_concurrency"] == "None" and sweep["num_prompts"] == "60"
    assert '"max_new_tokens": 1' in custom["extra_request_body"] and custom["tokenize_prompt"] == "False"
    assert custom_decode["sharegpt_output_len"] == "1024" and custom_decode["extra_request_body"] == "None"


def test_all_wrong_variables_are_named_at_once(tmp_path):
    run = script(
        "run_benchmark_mimo_pro_prefill.sh",
        INPUT_LENS="1024,0",
        RANDOM_RANGE_RATIO="1.5",
        DATASET_NAME="random",
        MATRICES="huge",
        BASE_URL="localhost:30000",
        FORCE="maybe",
        SERVER_LOG=str(tmp_path / "none.log"),
        NUM_PROMPTS="2",
    )
    assert run.returncode == 2
    for name in (
        "INPUT_LENS",
        "RANDOM_RANGE_RATIO",
        "DATASET_NAME",
        "MATRICES",
        "BASE_URL",
        "FORCE",
        "SERVER_LOG",
        "NUM_PROMPTS",
    ):
        assert name in run.stderr, f"{name} is not named in:\n{run.stderr}"
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"DATASET_PATH": "x"}, "DATASET_PATH=x: random-ids reads no file"),
        ({"DATASET_NAME": "custom", "DATASET_PATH": "/none"}, "DATASET_PATH=/none: no such file"),
        ({"DATASET_NAME": "custom", "RANDOM_RANGE_RATIO": "0.5"}, "RANDOM_RANGE_RATIO: has no effect"),
        ({"DATASET_NAME": "sharegpt", "INPUT_LENS": "8"}, "INPUT_LENS: has no effect"),
        ({"NUM_PROMPTS": "3"}, "NUM_PROMPTS=3: below the concurrency 64"),
    ],
)
def test_settings_that_contradict_each_other(settings, text):
    reader = variables.Reader(settings)
    bench_settings.prefill(reader)
    with pytest.raises(variables.WrongSettings, match=text.replace("(", r"\(")):
        reader.finish()


@pytest.mark.parametrize(
    "settings, text",
    [
        ({}, "TARGET_TTFT_MS: not set"),
        ({"TARGET_TTFT_MS": "100", "START_RATE": "5", "MAX_RATE": "2"}, "START_RATE=5: must be from MIN_RATE"),
        ({"TARGET_TTFT_MS": "100", "TTFT_PERCENTILE": "p95"}, "TTFT_PERCENTILE='p95'"),
    ],
)
def test_settings_of_the_sweep(settings, text):
    run = script("bench_sglang_prefill_sweep.sh", **settings)
    assert run.returncode == 2 and text in run.stderr


def test_cells_carry_what_their_key_says():
    reader = variables.Reader({"INPUT_LENS": "128 256", "CONCURRENCIES": "1,16", "SEED": "7"})
    run, grid = bench_settings.prefill(reader)
    reader.finish()
    assert [(c.input_len, c.concurrency, c.num_prompts) for c in grid] == [
        (128, 1, 8),
        (128, 16, 64),
        (256, 1, 8),
        (256, 16, 64),
    ]
    keys = {cell.key(run.work) for cell in grid}
    assert len(keys) == 4 and "prefill/prefill/random-ids-ratio1-seed7/in256-out1-c16-n64" in keys


def test_no_server_is_wrong_input():
    run = script("benchmark_sglang_prefill.sh", BASE_URL="http://127.0.0.1:9")
    assert run.returncode == 2 and "no SGLang server answers at http://127.0.0.1:9" in run.stderr


def test_each_benchmark_refuses_the_other_kind_of_server():
    real, fake = bench_server.facts_of(REAL), bench_server.facts_of(FAKE_PREFILL)
    bench_server.check_mode(real, fake_prefill=False)
    bench_server.check_mode(fake, fake_prefill=True)
    with pytest.raises(server_info.ServerRefused, match="computes no prefill"):
        bench_server.check_mode(fake, fake_prefill=False)
    with pytest.raises(server_info.ServerRefused, match="needs a fake-prefill server .*--disaggregation-mode null"):
        bench_server.check_mode(real, fake_prefill=True)
    pd = bench_server.facts_of({**REAL, "disaggregation_mode": "prefill"})
    with pytest.raises(server_info.ServerRefused, match="PD mode prefill"):
        bench_server.check_mode(pd, fake_prefill=False)


def test_what_is_simulated_is_stamped_and_must_agree():
    fake, real = bench_server.facts_of(FAKE_PREFILL), bench_server.facts_of(REAL)
    assert bench_server.simulated(real, False, None) == ()
    assert bench_server.simulated(fake, True, 5.56) == ("fake prefill", "simulated acceptance 5.56")
    assert bench_server.simulated(fake, True, None) == ("fake prefill", "acceptance on an undefined KV cache")
    told = {"internal_states": [{"env_vars": {"SGLANG_SIMULATE_ACC_LEN": "4"}}], "load_format": "dummy"}
    told = bench_server.facts_of({**FAKE_PREFILL, **told})
    assert bench_server.simulated(told, True, None) == ("fake prefill", "simulated acceptance 4", "dummy weights")
    experts = {"internal_states": [{}, {"env_vars": {"SGLANG_SIMULATE_UNIFORM_EXPERTS": "1"}}]}
    stamps = bench_server.simulated(bench_server.facts_of({**REAL, **experts}), False, None)
    assert stamps == ("experts picked evenly in place of the router's",), "one rank that says so is enough"
    with pytest.raises(server_info.ServerRefused, match="the server simulates 4"):
        bench_server.simulated(told, True, 5.56)


def test_a_failed_cell_is_recorded_with_its_logs_and_the_others_run(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("[2026-12-02 10:00:00] the server's last words\n")
    settings = {**TWO_CELLS, "OUT_DIR": str(tmp_path / "out"), "SERVER_LOG": str(log)}
    with StubServer(REAL) as server:
        run = stub_run("matrix", "prefill", BASE_URL=server.url, STUB_FAIL="--max-concurrency 1", **settings)
        assert run.returncode == 1, run.stderr
        first, second = cells(tmp_path / "out")
        assert first.outcome == "failed" and "planted fault" in first.reason
        assert first.client_log[-1] == "ValueError: planted fault" and "last words" in first.server_log[-1]
        assert "planted fault" in run.stderr and "1 of 2 cells passed" in run.stderr
        assert second.outcome == "passed" and second.figures.input_throughput == 200
        assert second.figures.ttft_ms.p50 == pytest.approx(250) and second.provenance.simulated == ()

        again = stub_run("matrix", "prefill", BASE_URL=server.url, **settings)
        assert again.returncode == 0 and "1 of 2 cells passed before" in again.stderr
        assert [record.key for record in cells(tmp_path / "out")] == [first.key, second.key, first.key]
        stub_run("matrix", "prefill", BASE_URL=server.url, FORCE="1", **settings)
        assert len(cells(tmp_path / "out")) == 5

    with StubServer({**REAL, "tp_size": 4}) as other:
        run = stub_run("matrix", "prefill", BASE_URL=other.url, **settings)
        assert run.returncode == 2 and "another server (tp_size 2, now 4)" in run.stderr


def test_an_interrupted_run_stops_its_client_and_goes_on_where_it_was(tmp_path):
    settings = {**TWO_CELLS, "OUT_DIR": str(tmp_path / "out")}
    pid_file = tmp_path / "pid"
    command = [sys.executable, Path(__file__).with_name("bench_stubs.py"), "matrix", "prefill"]
    with StubServer(REAL) as server:
        env = environment(BASE_URL=server.url, STUB_HANG="--max-concurrency 2", STUB_PID_FILE=str(pid_file), **settings)
        run = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        try:
            client = int(_wait_for_text(pid_file))
            run.send_signal(signal.SIGINT)
            _, errors = run.communicate(timeout=30)
        finally:
            run.kill()
        assert run.returncode == 130 and "goes on with what is missing" in errors
        assert not psutil.pid_exists(client) or psutil.Process(client).status() == psutil.STATUS_ZOMBIE
        assert [record.outcome for record in cells(tmp_path / "out")] == ["passed", "interrupted"]
        again = stub_run("matrix", "prefill", BASE_URL=server.url, **settings)
        assert again.returncode == 0, again.stderr
        assert [record.outcome for record in cells(tmp_path / "out")] == ["passed", "interrupted", "passed"]


def test_a_server_that_dies_fails_its_cell_and_the_rest_at_once(tmp_path):
    settings = {**TWO_CELLS, "CONCURRENCIES": "1,2,4", "OUT_DIR": str(tmp_path / "out")}
    start = time.monotonic()
    with StubServer(REAL) as server:
        run = stub_run("matrix", "prefill", BASE_URL=server.url, STUB_KILL=str(server.process.pid), **settings)
    assert run.returncode == 1 and time.monotonic() - start < 30
    found = cells(tmp_path / "out")
    assert [record.outcome for record in found] == ["failed"] * 3
    assert "went away during the cell" in found[0].reason and "stub client" in found[0].client_log[-1]
    assert all("not run: nothing listens" in record.reason for record in found[1:])


def test_a_decode_matrix_is_stamped_and_its_acceptance_is_checked(tmp_path):
    settings = {**TWO_CELLS, "OUTPUT_LEN": "8", "SGLANG_SIMULATE_ACC_LEN": "5.56"}
    with StubServer(FAKE_PREFILL) as server:
        good = stub_run(
            "matrix", "decode", BASE_URL=server.url, OUT_DIR=str(tmp_path / "a"), STUB_ACCEPT="[5.5, null]", **settings
        )
        assert good.returncode == 0, good.stderr
        bad = stub_run(
            "matrix", "decode", BASE_URL=server.url, OUT_DIR=str(tmp_path / "b"), STUB_ACCEPT="[5.5, 3.0]", **settings
        )
        assert bad.returncode == 1
        prefill = stub_run("matrix", "prefill", BASE_URL=server.url, OUT_DIR=str(tmp_path / "c"))
        assert prefill.returncode == 2 and not (tmp_path / "c").exists()
    for record in cells(tmp_path / "a"):
        assert record.provenance.simulated == ("fake prefill", "simulated acceptance 5.56")
        assert record.accept_lengths == (5.5, None)
    assert "a DP rank reports an accept length of 3.00" in cells(tmp_path / "b")[0].reason


def test_a_sweep_finds_its_rate_and_a_second_one_measures_nothing(tmp_path):
    """The stub's p90 is 0.09 s times the number of requests, which is rate times 10 s: 5 s are reached at 5.5 per s."""
    settings = {"DURATION_S": "10", "START_RATE": "2", "MAX_RATE": "16", "TOLERANCE": "0.2", "REPEATS": "2"}
    with StubServer(REAL) as server:
        given = {**settings, "BASE_URL": server.url, "OUT_DIR": str(tmp_path)}
        run = stub_run("sweep", TARGET_TTFT_MS="5000", **given)
        assert run.returncode == 0, run.stderr
        measured = cells(tmp_path)
        (found,) = records.read(tmp_path / SWEEPS, SweepRecord)
        assert found.rate <= 5.5 <= found.first_failing_rate <= found.rate * 1.2
        assert sum(len(point.measured_ms) for point in found.points) == len(measured)
        assert {cell.num_prompts for cell in measured} >= {20, 40, 80}
        assert len({cell.seed for cell in measured}) == 2, "a repeat has the arrivals of the first try"
        stub_run("sweep", TARGET_TTFT_MS="5000", **given)
        assert len(cells(tmp_path)) == len(measured)

        none = stub_run("sweep", TARGET_TTFT_MS="1", MIN_RATE="1", **given)
        assert none.returncode == 1 and "lowest rate misses the target (1.000 requests/s)" in none.stderr
        broken = stub_run("sweep", TARGET_TTFT_MS="5000", FORCE="1", STUB_FAIL="--request-rate 4", **given)
        assert broken.returncode == 1 and "at 4.000 requests/s: the client ended" in broken.stderr


@pytest.mark.parametrize(
    "changes, text",
    [
        (
            {"errors": ["", "Traceback\n  ..\nConnectionError: gone", ""]},
            "1 of 3 requests failed.*ConnectionError: gone",
        ),
        ({"errors": ["", ""]}, "gave 2 of 3 prompts"),
        ({"completed": 2}, "2 of 3 requests were answered"),
    ],
)
def test_a_result_without_every_answer_is_no_result(tmp_path, changes, text):
    file = tmp_path / "out.jsonl"
    file.write_text(json.dumps(result(3, **changes)) + "\n")
    with pytest.raises(CellFailed, match=text):
        bench_client.read_output(file, 3)


def test_answers_without_text_have_no_time_to_first_token(tmp_path):
    """The client leaves 0 where no piece of text came; that would drag every percentile down."""
    file = tmp_path / "out.jsonl"
    file.write_text(json.dumps(result(4, ttfts=[0.0, 0.2, 0.2, 0.0])) + "\n")
    figures, _ = bench_client.read_output(file, 4)
    assert figures.ttft_missing == 2 and figures.ttft_ms.p50 == pytest.approx(200)


@pytest.mark.parametrize("share, expected", [(0, 1), (0.5, 2.5), (0.9, 3.7), (1, 4)])
def test_percentiles_interpolate(share, expected):
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == pytest.approx(expected)


def _wait_for_text(file: Path, timeout_s: float = 30) -> str:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if text := file.read_text():
                return text
        time.sleep(0.05)
    raise TimeoutError(f"{file} was not written")
