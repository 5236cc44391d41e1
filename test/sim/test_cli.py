"""`python -m gfx942sim` on a kernel that Triton compiles here, and on files that are not what they should be."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import triton
import triton.language as tl

from gfx942sim import CodeObject
from gfx942sim.cli import main
from test_cost import MIX, report_of


@triton.jit
def product(a, b, c):
    i = tl.arange(0, 32)
    at = i[:, None] * 32 + i[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"a": "*bf16", "b": "*bf16", "c": "*fp32"}
    result = triton.compile(ASTSource(product, signature, {}), target=GPUTarget("hip", "gfx942", 64))
    path = tmp_path_factory.mktemp("cli") / "product.hsaco"
    path.write_bytes(result.asm["hsaco"])
    return path, result.asm["amdgcn"]


def mnemonics_in_text(assembly: str) -> dict[str, int]:
    """Mnemonics of the kernel's own code in LLVM's text, without encoding suffixes."""
    body = assembly.split("product:")[1].split("s_endpgm")[0] + "\n\ts_endpgm\n"
    if ".p2align\t8" in body:  # code for firmware without preload comes first
        body = body.split(".p2align\t8", 1)[1]
    found: dict[str, int] = {}
    for name in re.findall(r"^\t([sv]_\w+|ds_\w+|global_\w+|buffer_\w+)", body, re.MULTILINE):
        name = re.sub(r"_(e32|e64|dpp|sdwa)$", "", name)
        found[name] = found.get(name, 0) + 1
    return found


def test_inspect_counts_what_llvm_printed(compiled, capsys):
    path, assembly = compiled
    assert main(["inspect", str(path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    expected = mnemonics_in_text(assembly)
    names = ("v_mfma", "ds_", "global_", "buffer_", "s_barrier", "s_endpgm")
    assert expected and {n: c for n, c in found["mnemonics"].items() if n.startswith(names)} == {
        n: c for n, c in expected.items() if n.startswith(names)
    }
    assert found["classes"]["mfma"] == sum(c for n, c in expected.items() if n.startswith("v_mfma"))
    assert found["instructions"] == sum(found["classes"].values()) == sum(found["mnemonics"].values())
    assert found["kernel"] == "product" and found["max_block"] == 256
    resources = CodeObject.from_file(path).resources("product")
    assert found["resources"]["vgpr"] == resources.vgpr == int(re.search(r"\.vgpr_count:\s+(\d+)", assembly)[1])
    assert found["waves_per_simd"] == resources.waves_per_simd(256)


def test_inspect_prints_a_table(compiled, capsys):
    assert main(["inspect", str(compiled[0])]) == 0
    out = capsys.readouterr().out
    assert "product" in out and "v_mfma_f32" in out and "per SIMD at the largest block of 256" in out


def test_as_a_module(compiled):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-m", "gfx942sim", "inspect", str(compiled[0])], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0 and "product" in done.stdout


@pytest.mark.parametrize("damage", ["missing", "text", "empty", "short", "header", "directory", "other target"])
def test_inspect_of_a_broken_file_is_one_line_and_exit_2(compiled, tmp_path, capsys, damage):
    good, path = compiled[0].read_bytes(), tmp_path / "broken.hsaco"
    other = bytearray(good)
    other[48] = 0x3F  # the target in the ELF flags
    content = {
        "text": b"hello",
        "empty": b"",
        "short": good[: len(good) // 3],
        "header": good[:20],
        "other target": bytes(other),
    }
    if damage == "directory":
        path.mkdir()
    elif damage in content:
        path.write_bytes(content[damage])
    assert main(["inspect", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("gfx942sim: ") and "broken.hsaco" in err


@pytest.fixture
def two_reports(tmp_path):
    for name, total in (("a", 10), ("b", 30)):
        report_of(program=MIX, ran=2, total=total).save(tmp_path / f"{name}.json")
    return str(tmp_path / "a.json"), str(tmp_path / "b.json")


def test_diff_prints_ratios(two_reports, capsys):
    assert main(["diff", *two_reports, "--json"]) == 0
    rows = {row["figure"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["mfma"] == {"figure": "mfma", "a": 70, "b": 210, "ratio": 3}
    assert rows["waves per SIMD"]["ratio"] == 1
    assert rows["valu bound us"]["ratio"] == pytest.approx(3)
    assert rows["hbm bound us"]["ratio"] is None
    assert main(["diff", *two_reports]) == 0
    assert re.search(r"^mfma +70 +210 +3\.000$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": "x"}', b"\xff\xfe\x00"])
def test_diff_of_a_broken_file_is_one_line_and_exit_2(two_reports, tmp_path, capsys, content):
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for files in ((two_reports[0], str(path)), (str(path), two_reports[0])):
        assert main(["diff", *files]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and "broken.json" in err


def test_no_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
