"""Who may import whom (docs/architecture.md), read from the source; and that the light commands stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_dflash_rocm

ROOT = Path(sglang_dflash_rocm.__file__).parent
STDLIB = sys.stdlib_module_names


def _imports(file: Path, everywhere: bool = True) -> set[str]:
    """Absolute names of the modules a file imports, those inside functions too unless ``everywhere`` is off."""
    tree = ast.parse(file.read_text())
    nodes = ast.walk(tree) if everywhere else tree.body
    package = ["sglang_dflash_rocm", *file.relative_to(ROOT).parts[:-1]]
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            module = f"{base}{node.module or ''}".strip(".")
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def _under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _files(*folders: str) -> list[Path]:
    return [file for folder in folders for file in (ROOT / folder).rglob("*.py")]


def _ours(*parts: str) -> tuple[str, ...]:
    return tuple(f"sglang_dflash_rocm.{part}" for part in parts)


def _violations(files: list[Path], *forbidden: str) -> list[str]:
    return [f"{f.relative_to(ROOT)}: {name}" for f in files for name in sorted(_imports(f)) if _under(name, *forbidden)]


def test_kernels_know_nothing_above_them():
    assert _violations(_files("kernels"), "sglang", *_ours("srt", "cpu", "cli", "testing", "plugin", "gate")) == []


def test_srt_is_below_cpu_cli_and_plugin():
    assert _violations(_files("srt"), *_ours("cpu", "cli", "testing", "plugin")) == []


def test_only_the_demo_and_tests_use_testing():
    users = [f for f in ROOT.rglob("*.py") if "testing" not in f.parts and f.name != "demo.py"]
    assert _violations(users, *_ours("testing")) == []


def test_testing_does_not_import_sglang():
    """The references must not share SGLang's faults; ``testing/live`` alone runs SGLang, and imports it in a rank."""
    live = _files("testing/live")
    references = [file for file in _files("testing") if file not in live]
    assert live and references
    assert _violations(references, "sglang", *_ours("testing.live")) == []
    at_import = {name for file in live for name in _imports(file, everywhere=False)}
    assert not [name for name in at_import if _under(name, "sglang", "torch")]


def test_nothing_below_imports_cpu():
    users = [f for f in ROOT.rglob("*.py") if not {"cpu", "cli"} & set(f.relative_to(ROOT).parts)]
    assert _violations(users, *_ours("cpu")) == []


@pytest.mark.parametrize("name", ["compat.py", "hook_table.py"])
def test_the_contract_needs_only_the_standard_library_and_packaging(name):
    allowed = {"packaging", "sglang_dflash_rocm", "__future__"} | STDLIB
    assert {module.split(".")[0] for module in _imports(ROOT / name)} <= allowed


def test_the_rules_would_notice():
    """A planted import of each kind is seen: relative, absolute, inside a function."""
    file = ROOT / "kernels" / "planted.py"
    tree = "from ..srt import x\ndef f():\n    import sglang.srt.environ\n"
    try:
        file.write_text(tree)
        assert len(_violations([file], "sglang", *_ours("srt"))) == 3
    finally:
        file.unlink()


def test_import_and_help_load_neither_torch_nor_sglang():
    code = (
        "import sys, sglang_dflash_rocm, sglang_dflash_rocm.compat, sglang_dflash_rocm.gate\n"
        "from typer.testing import CliRunner\n"
        "from sglang_dflash_rocm.cli.main import app\n"
        "result = CliRunner().invoke(app, ['--help'])\n"
        "assert result.exit_code == 0 and 'demo' in result.output, result.output\n"
        "print(sorted({'torch', 'sglang', 'numpy'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
