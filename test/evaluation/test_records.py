"""Records on disk: whole lines, and clear errors for anything else."""

from __future__ import annotations

import pytest

from sglang_dflash_rocm.evaluation import records


class Cell(records.Record, tag="cell", frozen=True, kw_only=True):
    tokens: int


PROVENANCE = records.Provenance(
    tool="test", started="2026-01-01T00:00:00Z", versions={"sglang": "0.5.23"}, server={"tp_size": 8, "model": None}
)


def cell(key: str, tokens: int) -> Cell:
    return Cell(key=key, outcome="passed", provenance=PROVENANCE, tokens=tokens)


def test_what_is_written_is_read_and_the_last_of_a_key_counts(tmp_path):
    path = tmp_path / "new" / "records.jsonl"
    assert records.read(path, Cell) == []
    for tokens in (1, 2):
        records.append(path, cell("a", tokens))
    records.append(path, cell("b", 3))
    assert [row.tokens for row in records.read(path, Cell)] == [1, 2, 3]
    assert {key: row.tokens for key, row in records.latest(records.read(path, Cell)).items()} == {"a": 2, "b": 3}


def test_a_line_that_a_killed_writer_left_is_not_read_and_is_replaced(tmp_path):
    path = tmp_path / "records.jsonl"
    records.append(path, cell("a", 1))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:25])
    assert [row.key for row in records.read(path, Cell)] == ["a"]
    records.append(path, cell("b", 2))
    assert [row.key for row in records.read(path, Cell)] == ["a", "b"]


@pytest.mark.parametrize("line", ["{}", "nonsense", '{"kind":"other"}'])
def test_any_other_line_names_the_file_and_the_line(tmp_path, line):
    path = tmp_path / "records.jsonl"
    records.append(path, cell("a", 1))
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(records.RecordError, match=r"records.jsonl, line 2: not a Cell record"):
        records.read(path, Cell)
