"""GSM8K for evalscope: is the folder what it needs, the task, and what its output files say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from .acceptance import RequestFigures

FRONT_MATTER = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: train.jsonl
  - split: test
    path: test.jsonl
---
"""
_FILES = {"train": "train.jsonl", "test": "test.jsonl"}
_ANSWER = re.compile(r"####\s*[-+]?[\d,]*\.?\d+\s*$")

EXTRA = "sglang"
"""Key of `RequestFigures` in the metadata of evalscope's predictions."""


class DatasetError(ValueError):
    """A folder that evalscope cannot read GSM8K from; one line per fault, each with its file and line."""


def check_dataset(folder: Path, few_shot: int, questions: int | None) -> int:
    """Number of test questions in a local GSM8K folder.

    Without `README.md` and its configuration "main", evalscope's loader only says "BuilderConfig 'main' not found".

    Args:
        few_shot: solved examples that a prompt takes from the train split.
        questions: how many test questions are wanted, None for all.

    Raises:
        DatasetError: every fault of the folder.
    """
    if not folder.is_dir():
        raise DatasetError(f"DATASET_PATH={folder}: not a folder with train.jsonl, test.jsonl and README.md")
    faults = list(_front_matter_faults(folder / "README.md"))
    rows = {}
    for split, name in _FILES.items():
        if (folder / name).is_file():
            lines = (folder / name).read_bytes().splitlines()
            faults += _row_faults(folder / name, lines)
            rows[split] = len(lines)
        else:
            faults.append(f"{folder / name}: missing (the {split} split)")
    if few_shot > rows.get("train", few_shot):
        faults.append(f"{folder / _FILES['train']}: {rows['train']} rows, too few for FEW_SHOT={few_shot}")
    if questions and questions > rows.get("test", questions):
        faults.append(f"{folder / _FILES['test']}: {rows['test']} rows, too few for NUM_QUESTIONS={questions}")
    if faults:
        raise DatasetError("\n".join(faults))
    return questions or rows["test"]


def prepare_dataset(folder: Path) -> str:
    """Give the folder's README.md the front matter that evalscope's loader needs; what was done, in words.

    Raises:
        DatasetError: README.md has another front matter, which is left alone.
    """
    if not folder.is_dir():
        raise DatasetError(f"DATASET_PATH={folder}: not a folder")
    readme = folder / "README.md"
    text = readme.read_text(errors="replace") if readme.exists() else ""
    if not list(_front_matter_faults(readme)):
        return f"{readme}: nothing to do"
    if text.startswith("---"):
        raise DatasetError(f"{readme}: has another front matter; change it by hand to\n{FRONT_MATTER}")
    readme.write_text(FRONT_MATTER + text)
    return f"{readme}: front matter added"


def _front_matter_faults(readme: Path) -> Iterator[str]:
    fix = f"add it with --prepare-dataset, or put this at its top:\n{FRONT_MATTER}"
    if not readme.is_file():
        yield f"{readme}: missing, so the loader finds no configuration 'main'; {fix}"
        return
    import yaml

    head, found, _ = readme.read_text(errors="replace").removeprefix("---\n").partition("\n---")
    if not found or not readme.read_text(errors="replace").startswith("---\n"):
        yield f"{readme}, line 1: no front matter, so the loader finds no configuration 'main'; {fix}"
        return
    try:
        configs = {config["config_name"]: config for config in yaml.safe_load(head)["configs"]}
        files = {entry["split"]: entry["path"] for entry in configs["main"]["data_files"]}
    except (yaml.YAMLError, KeyError, TypeError) as error:
        what = " ".join(str(error).split())
        yield f"{readme}: front matter without configuration 'main' and its data_files ({what}); use\n{FRONT_MATTER}"
        return
    for split, name in _FILES.items():
        if files.get(split) != name:
            yield f"{readme}: split {split} is {files.get(split)!r}, must be {name!r}"


def _row_faults(path: Path, lines: list[bytes], most: int = 3) -> list[str]:
    faults = [f"{path}, line {number}: {fault}" for number, line in enumerate(lines, 1) if (fault := _row_fault(line))]
    if not lines:
        return [f"{path}: empty"]
    return faults[:most] + ([f"{path}: {len(faults) - most} more lines like that"] if len(faults) > most else [])


def _row_fault(line: bytes) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        return f"not JSON: {error}"
    for field in ("question", "answer"):
        if not isinstance(row, dict) or not isinstance(row.get(field), str) or not row[field].strip():
            return f"no text in field {field!r}"
    return "" if _ANSWER.search(row["answer"]) else "answer does not end in '#### <number>'"


@dataclass(frozen=True)
class Results:
    """What evalscope wrote for one run, one entry per sample index.

    score: its report's, four decimals. scores: by sample index, 1 right, 0 wrong. figures: SGLang's figures of the
    request, None where it gave none. truncated: sample indices cut at the token limit.
    """

    score: float
    scores: dict[int, float]
    figures: dict[int, RequestFigures | None]
    truncated: tuple[int, ...]


class ResultsError(Exception):
    """evalscope's output files are missing or not as version 1.14.1 writes them."""


class _Choice(msgspec.Struct):
    stop_reason: str | None = None


class _Output(msgspec.Struct):
    choices: list[_Choice] = []
    metadata: dict[str, msgspec.Raw] | None = None


class _Prediction(msgspec.Struct):
    index: int
    model_output: _Output


class _Score(msgspec.Struct):
    value: dict[str, float]


class _SampleScore(msgspec.Struct):
    score: _Score


class _Review(msgspec.Struct):
    index: int
    sample_score: _SampleScore


class _Identity(msgspec.Struct):
    name: str


class _Metric(msgspec.Struct):
    identity: _Identity
    score: float


class _Report(msgspec.Struct):
    metrics: list[_Metric]


_METRIC = "accuracy"


def predictions_file(outputs: Path, model_id: str) -> Path:
    return outputs / "predictions" / model_id / "gsm8k_main.jsonl"


def read_results(outputs: Path, model_id: str) -> Results:
    """What evalscope wrote under its ``work_dir``. A sample that it asked twice counts once, its last answer.

    Raises:
        ResultsError: a file is missing or has another shape.
    """
    predictions = {p.index: p for p in _rows(predictions_file(outputs, model_id), _Prediction)}
    reviews = {r.index: r for r in _rows(outputs / "reviews" / model_id / "gsm8k_main.jsonl", _Review)}
    report = outputs / "reports" / model_id / "gsm8k.json"
    try:
        metrics = msgspec.json.decode(report.read_bytes(), type=_Report).metrics
        score = next(metric.score for metric in metrics if metric.identity.name == _METRIC)
        scores = {index: review.sample_score.score.value[_METRIC] for index, review in reviews.items()}
        figures = {index: _figures(prediction.model_output) for index, prediction in predictions.items()}
    except (OSError, msgspec.DecodeError, KeyError, StopIteration) as error:
        raise ResultsError(f"evalscope's results under {outputs} cannot be read: {error!r}") from None
    cut = (i for i, p in predictions.items() if any(c.stop_reason == "max_tokens" for c in p.model_output.choices))
    return Results(score, scores, figures, tuple(sorted(cut)))


def mend(outputs: Path, model_id: str) -> None:
    """Cut off a prediction that a killed evalscope left half-written: it would append to that line and lose both. (It
    makes the reviews of a resumed run anew.)"""
    path = predictions_file(outputs, model_id)
    data = path.read_bytes() if path.exists() else b""
    if data and not data.endswith(b"\n"):
        path.write_bytes(data[: data.rfind(b"\n") + 1])


def _figures(output: _Output) -> RequestFigures | None:
    raw = (output.metadata or {}).get(EXTRA)
    return None if raw is None else msgspec.json.decode(raw, type=RequestFigures)


def _rows(path: Path, kind: type) -> list:
    decoder = msgspec.json.Decoder(kind)
    try:
        return [decoder.decode(line) for line in path.read_bytes().splitlines()]
    except (OSError, msgspec.DecodeError) as error:
        raise ResultsError(f"{path} cannot be read: {error}") from None
