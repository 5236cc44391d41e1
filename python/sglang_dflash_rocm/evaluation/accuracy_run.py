"""One accuracy run: checks of the server, evalscope, what its files and the server say, verdict."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from . import accuracy_server, gsm8k, server_info
from .acceptance import summarise
from .accuracy_folder import AccuracyRecord, RunFolder, dataset_digest
from .accuracy_server import LiveServer, ServerGone
from .accuracy_settings import GSM8K_QUESTIONS, Settings
from .evalscope_client import KEY_VARIABLE, TABLE
from .gates import Figures, judge
from .records import Outcome, Provenance, utc_now
from .server_info import Fact, ServerRefused
from .variables import WrongSettings

EVALSCOPE = "1.14.1"
OK, FAILED, BROKE, INTERRUPTED = 0, 1, 3, 130
"""Exit codes: all gates passed, one failed, evalscope or the server ended early, SIGINT or SIGTERM."""

_IDLE_TIMEOUT_S = 60
_POLL_S = 0.2
_LOG_LINES = 15


class RunBroke(Exception):
    """evalscope did not come to its end; the message says why."""


def run(settings: Settings, questions: int) -> int:
    """The whole run over the first ``questions`` of the test split; its exit code. The record of every attempt goes to
    the run's folder, and to the end of stdout.

    Raises:
        WrongSettings, ServerRefused, ServerGone, FolderRefused: before anything was started.
        KeyboardInterrupt: before there was a folder for a record.
    """
    _check_evalscope(settings)
    server = LiveServer(settings.base_url, settings.api_key)
    info = server.info()
    _preflight(server, info, settings)
    model_id = _name(info["model_path"])
    facts = accuracy_server.facts(info)
    asked = _asked(settings, questions)
    folder = RunFolder(settings.work_dir or _new_folder(model_id))
    resumed = folder.open({**msgspec.to_builtins(settings.thresholds), **asked, **facts, "evalscope": EVALSCOPE})
    record = AccuracyRecord(
        key=f"gsm8k {model_id}",
        outcome="failed",
        provenance=Provenance(
            tool="run_evalscope_gsm8k_accuracy",
            started=utc_now(),
            versions=_versions(info),
            server=facts,
        ),
        thresholds=settings.thresholds,
        asked=asked,
        notes=_notes(info, questions),
        work_dir=str(folder.path),
    )
    try:
        _say(f"{'going on with the run' if resumed else 'run'} in {folder.path}")
        done, code = _attempt(record, server, info, settings, folder)
        folder.add(done)
    finally:
        folder.close()
    _show(done)
    print(folder.summary_text(), flush=True)
    return code


def _attempt(
    record: AccuracyRecord, server: LiveServer, info: Mapping, settings: Settings, folder: RunFolder
) -> tuple[AccuracyRecord, int]:
    """Ask what is not answered yet and judge the whole: the record with its outcome, and the exit code."""
    model_id, questions = _name(info["model_path"]), record.asked["questions"]
    try:
        server.flush(_IDLE_TIMEOUT_S)
        gsm8k.mend(folder.outputs, model_id)
        _run_evalscope(settings, info["served_model_name"], model_id, folder, questions)
        results = gsm8k.read_results(folder.outputs, model_id)
        server.wait_idle(_IDLE_TIMEOUT_S)
        done = _judged(record, results, server_info.dp_ranks(info), server.accept_lengths())
        print((folder.outputs / TABLE).read_text())
    except KeyboardInterrupt:
        return _ended(record, "interrupted", "interrupted; the same command with this WORK_DIR goes on"), INTERRUPTED
    except (RunBroke, ServerGone, ServerRefused, gsm8k.ResultsError) as error:
        return _ended(record, "failed", f"the run broke: {_state(server)}{error}"), BROKE
    failed = [gate.name for gate in done.gates if not gate.passed]
    if failed:
        return _ended(done, "failed", f"gates failed: {', '.join(failed)}"), FAILED
    return _ended(done, "passed", ""), OK


def _ended(record: AccuracyRecord, outcome: Outcome, reason: str) -> AccuracyRecord:
    return msgspec.structs.replace(record, outcome=outcome, reason=reason)


def _state(server: LiveServer) -> str:
    try:
        server.info()
    except (ServerGone, ServerRefused) as error:
        return f"the server is gone ({error}); "
    return ""


def evalscope_task(settings: Settings, served_model: str, model_id: str, outputs: Path, questions: int) -> dict:
    """Fields of evalscope's `TaskConfig`, the key left out.

    A failing sample ends the run: evalscope would otherwise leave it out of the score. One retry, no streaming: SGLang
    gives a request's figures only with the whole answer.
    """
    dataset = {"few_shot_num": settings.few_shot}
    if settings.dataset_path is not None:
        dataset["local_path"] = str(settings.dataset_path.resolve())
    # Answers are taken over by sample, scores made anew: evalscope takes over scores only from the same address.
    resumed = {"use_cache": str(outputs), "rerun_review": True}
    return {
        "model": served_model,
        "model_id": model_id,
        "model_args": {"max_retries": 0},
        "api_url": f"{settings.base_url}/v1",
        "datasets": ["gsm8k"],
        "dataset_args": {"gsm8k": dataset},
        "limit": questions,
        "eval_batch_size": settings.eval_batch_size,
        "generation_config": {
            "temperature": 0.0,
            "max_tokens": settings.max_tokens,
            "timeout": settings.request_timeout_s,
            "retries": 1,
            "retry_interval": 1,
            "stream": False,
            "extra_body": accuracy_server.REQUEST_FLAGS,
        },
        "ignore_errors": False,
        "no_timestamp": True,
        "work_dir": str(outputs),
        **(resumed if (outputs / "configs" / "task_config.yaml").exists() else {}),
    }


def _check_evalscope(settings: Settings) -> None:
    found = metadata.version("evalscope") if importlib.util.find_spec("evalscope") else "none"
    if found != EVALSCOPE:
        raise WrongSettings(
            f"this needs evalscope {EVALSCOPE}, found {found}: {sys.executable} -m pip install evalscope=={EVALSCOPE}"
        )
    if settings.dataset_path is None and not importlib.util.find_spec("modelscope"):
        raise WrongSettings("without DATASET_PATH evalscope downloads GSM8K through modelscope, which is not installed")


def _preflight(server: LiveServer, info: Mapping, settings: Settings) -> None:
    if settings.model_path and _name(settings.model_path) not in (_name(info["model_path"]), info["served_model_name"]):
        raise ServerRefused(f"MODEL_PATH={settings.model_path}, but {server.base_url} serves {info['model_path']}")
    if reasons := accuracy_server.refusals(info):
        raise ServerRefused("this server's answers are not the model's:\n" + "\n".join(f"  {why}" for why in reasons))
    if settings.min_accept_length and not info.get("speculative_algorithm"):
        raise ServerRefused("the server runs without speculation: start it with DFLASH, or set MIN_ACCEPT_LENGTH=0")
    if settings.max_tokens >= (info.get("context_length") or settings.max_tokens + 1):
        raise ServerRefused(
            f"MAX_TOKENS={settings.max_tokens} does not fit in the server's context of {info['context_length']} tokens"
        )
    choice = server.probe(info["served_model_name"])
    missing = [name for name in ("meta_info", "response_token_ids") if choice.get(name) is None]
    if server_info.dp_ranks(info) > 1 and (choice.get("meta_info") or {}).get("dp_rank") is None:
        missing.append("meta_info.dp_rank")
    if missing:
        raise ServerRefused(
            f"no {', '.join(missing)} in the server's answers: ask SGLang 0.5.23 itself, without a router in front"
        )
    server.wait_idle(_IDLE_TIMEOUT_S)


def _run_evalscope(settings: Settings, served_model: str, model_id: str, folder: RunFolder, questions: int) -> None:
    """Run it to its end, with a progress bar; whatever happens, no process is left."""
    task = evalscope_task(settings, served_model, model_id, folder.outputs, questions)
    folder.task_file.write_text(json.dumps(task, indent=1) + "\n")
    command = [sys.executable, "-m", "sglang_dflash_rocm.evaluation.evalscope_client", str(folder.task_file)]
    with folder.log.open("ab") as log:
        # Not in our process group, so that Ctrl-C comes to us alone and it is ended once.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_client_environment(settings, folder),
            start_new_session=True,
        )
    try:
        _watch(process, gsm8k.predictions_file(folder.outputs, model_id), questions)
    finally:
        # It has threads and no children; what it was writing is mended by the next run.
        process.kill()
        process.wait()
    if process.returncode:
        tail = "\n".join(folder.log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
        raise RunBroke(f"evalscope ended with exit code {process.returncode}; log: {folder.log}\n{tail}")


def _client_environment(settings: Settings, folder: RunFolder) -> dict[str, str]:
    no_proxy = ",".join(filter(None, (os.environ.get("NO_PROXY"), urlsplit(settings.base_url).hostname)))
    env = {**os.environ, KEY_VARIABLE: settings.api_key, "NO_PROXY": no_proxy, "no_proxy": no_proxy}
    if settings.dataset_path is not None:
        cache = str((folder.path / "datasets-cache").resolve())
        env |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": cache}
    return env


def _watch(process: subprocess.Popen, predictions: Path, questions: int) -> None:
    from tqdm import tqdm

    interval_s = 0.5 if sys.stderr.isatty() else 15
    with tqdm(total=questions, unit="question", desc="GSM8K", mininterval=interval_s, file=sys.stderr) as bar:
        while process.poll() is None:
            time.sleep(_POLL_S)
            if predictions.exists():
                bar.update(predictions.read_bytes().count(b"\n") - bar.n)


def _judged(
    record: AccuracyRecord, results: gsm8k.Results, dp_ranks: int, server_lengths: Mapping[int, float | None]
) -> AccuracyRecord:
    requests = [figures for figures in results.figures.values() if figures is not None]
    acceptance = summarise(requests, dp_ranks, server_lengths)
    figures = Figures(
        asked=record.asked["questions"],
        scored=len(results.scores),
        correct=sum(results.scores.values()),
        evalscope_score=results.score,
        without_figures=tuple(sorted(index for index, request in results.figures.items() if request is None)),
        truncated=results.truncated,
        looped=tuple(sorted(index for index, request in results.figures.items() if request and request.loop)),
        acceptance=acceptance,
    )
    return msgspec.structs.replace(
        record,
        accuracy=figures.accuracy,
        mean_worker_accept_length=acceptance.mean_worker_accept_length,
        min_worker_accept_length=acceptance.min_worker_accept_length,
        accept_length=acceptance.accept_length,
        figures=figures,
        gates=judge(figures, record.thresholds),
    )


def _show(record: AccuracyRecord) -> None:
    for gate in record.gates:
        print(f"{'pass' if gate.passed else 'FAIL'}  {gate.name}: {gate.reason}")
    if record.figures is not None:
        print(f"note  {len(record.figures.truncated)} of {record.figures.asked} answers cut at MAX_TOKENS")
    for note in record.notes:
        print(f"note  {note}")
    if record.reason:
        _say(record.reason)


def _asked(settings: Settings, questions: int) -> dict[str, Fact]:
    """What makes two runs the same work: the questions and how they are asked."""
    dataset = "hub" if settings.dataset_path is None else dataset_digest(settings.dataset_path)
    return {
        "questions": questions,
        "dataset": dataset,
        "few_shot": settings.few_shot,
        "max_tokens": settings.max_tokens,
        "temperature": 0.0,
    }


def _notes(info: Mapping, questions: int) -> tuple[str, ...]:
    notes = []
    if questions != GSM8K_QUESTIONS:
        notes.append(f"{questions} questions, not GSM8K's {GSM8K_QUESTIONS}: not comparable with published figures")
    if server_info.environment(info) is None:
        notes.append(
            "the server does not tell its environment (SGLANG_EXPOSE_OWN_ENV_VARS=1 makes it), so simulated acceptance "
            "could only be looked for in the figures"
        )
    return tuple(notes)


def _versions(info: Mapping) -> dict[str, str]:
    return {
        "sglang-dflash-rocm": metadata.version("sglang-dflash-rocm"),
        "sglang": info["version"],
        "evalscope": EVALSCOPE,
        "python": platform.python_version(),
    }


def _name(model_path: str) -> str:
    return Path(model_path).name


def _new_folder(model_id: str) -> Path:
    return Path("outputs") / f"gsm8k-{model_id}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
