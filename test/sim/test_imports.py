"""The simulator stands alone: it knows nothing of the package it is used by, and needs little to be imported."""

import ast
import subprocess
import sys
from pathlib import Path

import gfx942sim

FILES = sorted(Path(gfx942sim.__file__).parent.glob("*.py"))
NEEDED = {"numpy", "tinygrad", "msgpack"}
# Each belongs to one launch path, and is imported only with it.
EXTRA = {"triton_target.py": {"triton", "torch"}}


def imported(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").split(".")[0])
    return names - set(sys.stdlib_module_names)


def test_what_each_module_imports():
    assert FILES
    wrong = {f.name: extra for f in FILES if (extra := imported(f) - NEEDED - EXTRA.get(f.name, set()))}
    assert wrong == {}


def test_importing_it_loads_neither_torch_nor_triton():
    code = "import sys, gfx942sim; sys.exit(','.join({'torch', 'triton', 'flydsl', 'sglang'} & set(sys.modules)) or 0)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""
