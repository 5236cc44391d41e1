"""A local GSM8K folder: every way in which it can be wrong is told with its file and line, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_dflash_rocm.evaluation.gsm8k import FRONT_MATTER, DatasetError, check_dataset, mend, prepare_dataset


def row(number: int) -> str:
    return json.dumps({"question": f"What is {number} + 1?", "answer": f"One more.\n#### {number + 1:,}"})


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "README.md").write_text(FRONT_MATTER + "# GSM8K\n")
    (tmp_path / "train.jsonl").write_text("".join(row(n) + "\n" for n in range(5)))
    (tmp_path / "test.jsonl").write_text("".join(row(n * 1000) + "\n" for n in range(6)))
    return tmp_path


def faults(folder: Path, few_shot: int = 4, questions: int | None = None) -> str:
    with pytest.raises(DatasetError) as caught:
        check_dataset(folder, few_shot, questions)
    return str(caught.value)


def test_a_right_folder(folder):
    assert check_dataset(folder, 4, None) == 6
    assert check_dataset(folder, 4, 3) == 3


def test_no_folder(folder):
    assert "not a folder" in faults(folder / "nothing")
    assert "not a folder" in faults(folder / "test.jsonl")


def test_a_missing_file(folder):
    (folder / "train.jsonl").unlink()
    assert faults(folder) == f"{folder}/train.jsonl: missing (the train split)"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "not JSON"),
        ("[]", "no text in field 'question'"),
        ('{"question": "q", "answer": ""}', "no text in field 'answer'"),
        ('{"question": "q", "answer": "42"}', "answer does not end in '#### <number>'"),
        ('{"question": "q", "answer": "#### forty"}', "answer does not end in '#### <number>'"),
        ("", "not JSON"),
    ],
)
def test_a_wrong_line_is_named(folder, line, fault):
    rows = (folder / "test.jsonl").read_text().splitlines()
    rows[2] = line
    (folder / "test.jsonl").write_text("\n".join(rows) + "\n")
    assert f"{folder}/test.jsonl, line 3: {fault}" in faults(folder)


def test_a_file_of_another_kind_does_not_flood_the_screen(folder):
    (folder / "test.jsonl").write_text("question,answer\n" * 1319)
    assert "1316 more lines like that" in faults(folder)


def test_all_faults_at_once(folder):
    (folder / "README.md").unlink()
    (folder / "test.jsonl").write_text("{\n")
    text = faults(folder, few_shot=9, questions=7)
    for part in ("README.md: missing", "test.jsonl, line 1", "5 rows, too few for FEW_SHOT=9", "NUM_QUESTIONS=7"):
        assert part in text


@pytest.mark.parametrize(
    ("readme", "fault"),
    [
        (None, "missing, so the loader finds no configuration 'main'"),
        ("# GSM8K\n", "line 1: no front matter"),
        ("---\nconfigs: [\n---\n", "front matter without configuration 'main'"),
        ("---\nlicense: mit\n---\n", "front matter without configuration 'main'"),
        (FRONT_MATTER.replace("main", "default"), "front matter without configuration 'main'"),
        (FRONT_MATTER.replace("test.jsonl", "eval.jsonl"), "split test is 'eval.jsonl', must be 'test.jsonl'"),
        (FRONT_MATTER.replace("split: train", "split: training"), "split train is None"),
    ],
)
def test_a_wrong_readme(folder, readme, fault):
    (folder / "README.md").unlink()
    if readme is not None:
        (folder / "README.md").write_text(readme)
    text = faults(folder)
    assert f"{folder}/README.md" in text and fault in text


@pytest.mark.parametrize("readme", [None, "# GSM8K\n", ""])
def test_prepare_adds_what_is_missing_and_keeps_the_text(folder, readme):
    (folder / "README.md").unlink()
    if readme is not None:
        (folder / "README.md").write_text(readme)
    assert "front matter added" in prepare_dataset(folder)
    assert check_dataset(folder, 4, None) == 6
    assert (folder / "README.md").read_text() == FRONT_MATTER + (readme or "")
    assert "nothing to do" in prepare_dataset(folder)


def test_prepare_leaves_another_front_matter_alone(folder):
    other = "---\nlicense: mit\n---\n"
    (folder / "README.md").write_text(other)
    with pytest.raises(DatasetError, match="another front matter"):
        prepare_dataset(folder)
    assert (folder / "README.md").read_text() == other


def test_a_half_written_prediction_is_cut_off(tmp_path):
    file = tmp_path / "predictions" / "m" / "gsm8k_main.jsonl"
    mend(tmp_path, "m")
    file.parent.mkdir(parents=True)
    for text, kept in (('{"a": 1}\n{"b"', '{"a": 1}\n'), ('{"b"', ""), ('{"a": 1}\n', '{"a": 1}\n')):
        file.write_text(text)
        mend(tmp_path, "m")
        assert file.read_text() == kept
