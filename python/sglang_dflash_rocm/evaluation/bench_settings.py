"""Environment variables of the benchmark scripts: default, what is allowed, what each is for; and cross-checks."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_dflash_rocm.environ import Variable, at_least, one_of
from sglang_dflash_rocm.evaluation.bench_client import OWN_LENGTH_DATASETS, RANDOM_DATASETS, Cell, Workload
from sglang_dflash_rocm.evaluation.bench_records import Phase
from sglang_dflash_rocm.evaluation.variables import Reader, between, number, switch, url

#: Name -> input lengths (tokens) and concurrencies of `run_benchmark_mimo_pro_prefill.sh`: chat-like prompts at load,
#: and long documents, of which few fit at once.
MIMO_MATRICES = {
    "short": ((1024, 2048, 4096, 8192), (1, 4, 16, 64)),
    "long": ((16384, 32768, 65536, 131072), (1, 2, 4, 8)),
}
_PROMPTS_PER_SLOT = 4
_LEAST_PROMPTS = 8
POSITIVE = number(lambda value: 0 < value < math.inf)


def _numbers(text: str) -> tuple[int, ...]:
    found = tuple(at_least(1)(word) for word in text.replace(",", " ").split())
    if not found or len(set(found)) < len(found):
        raise ValueError(text)
    return found


def _matrices(text: str) -> tuple[str, ...]:
    found = tuple(text.replace(",", " ").split())
    if not found or set(found) - set(MIMO_MATRICES):
        raise ValueError(text)
    return found


def _lengths(name: str, default: tuple[int, ...], doc: str) -> Variable[tuple[int, ...]]:
    return Variable(name, default, _numbers, "different whole numbers from 1 on, such as 1024,8192", doc)


def _count(name: str, default: int, doc: str, least: int = 1) -> Variable[int]:
    return Variable(name, default, at_least(least), f"a whole number, {least} or more", doc)


def _seconds(name: str, default: float, doc: str) -> Variable[float]:
    return Variable(name, default, POSITIVE, "a number of seconds above 0", doc)


def _rate(name: str, default: float, doc: str) -> Variable[float]:
    return Variable(name, default, POSITIVE, "requests per second, above 0", doc)


BASE_URL = Variable("BASE_URL", "http://127.0.0.1:30000", url, "an address with http:// or https://", "the server")
OUT_DIR = Variable(
    "OUT_DIR",
    None,
    Path,
    "a folder",
    "records and client logs; a run with the same one goes on there; not set: bench-results/ and the benchmark's name",
)
DATASET_NAME = Variable(
    "DATASET_NAME",
    "random-ids",
    one_of(*RANDOM_DATASETS, *OWN_LENGTH_DATASETS),
    f"one of {', '.join(RANDOM_DATASETS + OWN_LENGTH_DATASETS)}",
    "prompts: random token ids, ShareGPT text cut to length (random), ShareGPT conversations, or a JSONL of your own",
)
DATASET_PATH = Variable("DATASET_PATH", None, Path, "a file", "the data set's file; every one but random-ids needs it")
RANDOM_RANGE_RATIO = Variable(
    "RANDOM_RANGE_RATIO",
    1.0,
    number(lambda ratio: 0 < ratio <= 1),
    "a number above 0, at most 1",
    "lengths are drawn from [ratio * length, length]: below 1 the mean is shorter than the cell says (at 0.5, 75 %)",
)
SEED = _count("SEED", 42, "seed of prompts, lengths and arrival times", 0)
TOKENIZER = Variable("TOKENIZER", "", str, "a folder or a name", "the client's tokenizer; not set: the server's")
WARMUP_REQUESTS = _count("WARMUP_REQUESTS", 1, "requests before each cell; the cache is flushed after them")
CELL_TIMEOUT_S = _seconds("CELL_TIMEOUT_S", 3600.0, "a cell that takes longer has failed")
SERVER_LOG = Variable(
    "SERVER_LOG", None, Path, "a file", "the server's log, whose end goes into a failed cell's record"
)
EXTRA_CLIENT_ARGS = Variable(
    "EXTRA_CLIENT_ARGS",
    (),
    lambda text: tuple(shlex.split(text)),
    "client flags, quoted as in a shell",
    "more flags of `sglang.benchmark.serving`; they come last, so they win",
)
FORCE = switch("FORCE", 0, "1: measure again what has passed already")
DRY_RUN = switch("DRY_RUN", 0, "1: print every command and stop")
COMMON = (
    BASE_URL,
    OUT_DIR,
    DATASET_NAME,
    DATASET_PATH,
    RANDOM_RANGE_RATIO,
    SEED,
    TOKENIZER,
    WARMUP_REQUESTS,
    CELL_TIMEOUT_S,
    SERVER_LOG,
    EXTRA_CLIENT_ARGS,
    FORCE,
    DRY_RUN,
)

INPUT_LENS = _lengths("INPUT_LENS", (1024, 4096, 8192, 16384), "prompt tokens per request")
CONCURRENCIES = _lengths("CONCURRENCIES", (1, 4, 16, 64), "requests in flight at once")
NUM_PROMPTS = _count(
    "NUM_PROMPTS", 0, f"requests per cell; 0: {_PROMPTS_PER_SLOT} per request in flight, at least {_LEAST_PROMPTS}", 0
)
MATRICES = Variable(
    "MATRICES", ("short", "long"), _matrices, "short, long or both", "which of the MiMo matrices to run"
)
MIMO_INPUT_LENS = _lengths("INPUT_LENS", (), "prompt tokens per request; not set: those of MATRICES")
MIMO_CONCURRENCIES = _lengths("CONCURRENCIES", (), "requests in flight at once; not set: those of MATRICES")
DECODE_INPUT_LENS = _lengths("INPUT_LENS", (1024, 8192), "tokens of context per request, not computed")
DECODE_CONCURRENCIES = _lengths("CONCURRENCIES", (1, 8, 16, 32, 48, 96), "requests in flight at once")
OUTPUT_LEN = _count("OUTPUT_LEN", 1024, "tokens generated per request", 2)
SIMULATE_ACC_LEN = Variable(
    "SGLANG_SIMULATE_ACC_LEN",
    None,
    POSITIVE,
    "the server's value, above 0",
    "accept length that the server simulates; stamped on every record and compared with what it reports",
)
TARGET_TTFT_MS = Variable("TARGET_TTFT_MS", None, POSITIVE, "milliseconds, above 0", "time to first token to keep")
TTFT_PERCENTILE = Variable(
    "TTFT_PERCENTILE", "p90", one_of("p50", "p90", "p99"), "p50, p90 or p99", "which requests must keep it"
)
INPUT_LEN = _count("INPUT_LEN", 4096, "prompt tokens per request")
SWEEP_OUTPUT_LEN = _count("OUTPUT_LEN", 1, "tokens generated per request")
START_RATE = _rate("START_RATE", 1.0, "first rate")
MIN_RATE = _rate("MIN_RATE", 0.125, "lowest rate; missing the target there ends the search")
MAX_RATE = _rate("MAX_RATE", 64.0, "highest rate; keeping the target there ends the search")
DURATION_S = _seconds("DURATION_S", 60.0, "length of a measurement; rate times this is its number of requests")
TOLERANCE = Variable(
    "TOLERANCE", 0.05, between(0.001, 1), "a number from 0.001 to 1", "relative width of the final bracket"
)
REPEATS = _count("REPEATS", 3, "measurements of a noisy rate; their median counts")

PREFILL = (INPUT_LENS, CONCURRENCIES, NUM_PROMPTS, *COMMON)
MIMO_PREFILL = (MATRICES, MIMO_INPUT_LENS, MIMO_CONCURRENCIES, NUM_PROMPTS, *COMMON)
DECODE = (DECODE_INPUT_LENS, DECODE_CONCURRENCIES, OUTPUT_LEN, NUM_PROMPTS, SIMULATE_ACC_LEN, *COMMON)
SWEEP = (
    TARGET_TTFT_MS,
    TTFT_PERCENTILE,
    INPUT_LEN,
    SWEEP_OUTPUT_LEN,
    START_RATE,
    MIN_RATE,
    MAX_RATE,
    DURATION_S,
    TOLERANCE,
    REPEATS,
    *COMMON,
)


@dataclass(frozen=True)
class Run:
    """What every script needs besides its cells."""

    work: Workload
    out: Path
    cell_timeout_s: float
    server_log: Path | None
    force: bool
    dry_run: bool
    declared_accept: float | None = None


def read_run(reader: Reader, benchmark: str, fake_prefill: bool = False) -> Run:
    """The common variables; problems stay in the reader."""
    name, path, log = reader.get(DATASET_NAME), reader.get(DATASET_PATH), reader.get(SERVER_LOG)
    problems = reader.problems
    if name == "random-ids" and path is not None:
        problems.append(f"DATASET_PATH={path}: random-ids reads no file; unset it, or set DATASET_NAME=random")
    if name != "random-ids" and path is None:
        problems.append(f"DATASET_NAME={name}: needs a file; set DATASET_PATH to it (random-ids needs none)")
    elif name != "random-ids" and not path.is_file():
        problems.append(f"DATASET_PATH={path}: no such file; DATASET_NAME={name} needs one")
    if name in OWN_LENGTH_DATASETS and reader.given(RANDOM_RANGE_RATIO):
        problems.append(
            f"RANDOM_RANGE_RATIO: has no effect with DATASET_NAME={name}, which brings its lengths; unset it"
        )
    if log is not None and not log.is_file():
        problems.append(f"SERVER_LOG={log}: no such file; give the file that the server logs to, or unset it")
    work = Workload(
        base_url=reader.get(BASE_URL),
        dataset=name,
        dataset_path="" if path is None else str(path),
        range_ratio=reader.get(RANDOM_RANGE_RATIO),
        seed=reader.get(SEED),
        tokenizer=reader.get(TOKENIZER),
        warmup_requests=reader.get(WARMUP_REQUESTS),
        fake_prefill=fake_prefill,
        extra_args=reader.get(EXTRA_CLIENT_ARGS),
    )
    return Run(
        work=work,
        out=reader.get(OUT_DIR) or Path("bench-results") / benchmark,
        cell_timeout_s=reader.get(CELL_TIMEOUT_S),
        server_log=log,
        force=bool(reader.get(FORCE)),
        dry_run=bool(reader.get(DRY_RUN)),
    )


def check_input_variable(reader: Reader, run: Run, variable: Variable) -> None:
    """Lengths asked for of a data set that brings its own are a problem."""
    if run.work.dataset in OWN_LENGTH_DATASETS and reader.given(variable):
        reader.problems.append(
            f"{variable.name}: has no effect with DATASET_NAME={run.work.dataset}, which brings its lengths; unset it"
        )


def cells(
    reader: Reader,
    run: Run,
    matrix: str,
    phase: Phase,
    lengths: Sequence[int],
    concurrencies: Sequence[int],
    output_len: int,
) -> list[Cell]:
    """Every length with every concurrency; one row if the data set brings its lengths."""
    prompts, most = reader.get(NUM_PROMPTS), max(concurrencies)
    own = run.work.dataset in OWN_LENGTH_DATASETS
    if 0 < prompts < most:
        reader.problems.append(f"NUM_PROMPTS={prompts}: below the concurrency {most}, which it never reaches; raise it")
    return [
        Cell(phase, matrix, length, output_len, prompts or max(_LEAST_PROMPTS, _PROMPTS_PER_SLOT * slots), slots)
        for length in ((None,) if own else lengths)
        for slots in concurrencies
    ]


def prefill(reader: Reader) -> tuple[Run, list[Cell]]:
    """`benchmark_sglang_prefill.sh`."""
    run = read_run(reader, "prefill")
    check_input_variable(reader, run, INPUT_LENS)
    grid = cells(reader, run, "prefill", "prefill", reader.get(INPUT_LENS), reader.get(CONCURRENCIES), 1)
    return run, grid


def mimo_prefill(reader: Reader) -> tuple[Run, list[Cell]]:
    """`run_benchmark_mimo_pro_prefill.sh`; a cell of two matrices is measured once."""
    run = read_run(reader, "mimo-prefill")
    check_input_variable(reader, run, INPUT_LENS)
    grid: dict[tuple, Cell] = {}
    for name in reader.get(MATRICES):
        lengths, slots = MIMO_MATRICES[name]
        lengths = reader.get(MIMO_INPUT_LENS) or lengths
        slots = reader.get(MIMO_CONCURRENCIES) or slots
        for cell in cells(reader, run, "mimo-prefill", "prefill", lengths, slots, 1):
            grid.setdefault((cell.input_len, cell.concurrency), cell)
    return run, list(grid.values())


def decode(reader: Reader) -> tuple[Run, list[Cell]]:
    """`run_benchmark_mimo_decode.sh`."""
    run = read_run(reader, "decode", fake_prefill=True)
    check_input_variable(reader, run, DECODE_INPUT_LENS)
    lengths, slots = reader.get(DECODE_INPUT_LENS), reader.get(DECODE_CONCURRENCIES)
    grid = cells(reader, run, "decode", "decode", lengths, slots, reader.get(OUTPUT_LEN))
    return replace(run, declared_accept=reader.get(SIMULATE_ACC_LEN)), grid


#: How a matrix reads its variables, and which those are.
MATRIX_KINDS: dict[str, tuple[Callable[[Reader], tuple[Run, list[Cell]]], tuple[Variable, ...]]] = {
    "prefill": (prefill, PREFILL),
    "mimo-prefill": (mimo_prefill, MIMO_PREFILL),
    "decode": (decode, DECODE),
}
