"""What this package needs from SGLang, and whether the installed release still has it.

SGLang's plugin loader fails open: a hook on a name that is gone is one log line, and the server runs unpatched. So each
target of the hook table is compared with a stored fingerprint **before** anything is registered, by reading source
files: nothing of SGLang is imported here, only the standard library and ``packaging``.

``before``, ``after`` and ``reads`` hooks rely on a target's name and parameters; ``around``, ``replace`` and ``value``
hooks also on its body, because they stand in for it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import re
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from sglang_dflash_rocm.hook_table import HOOKS, Hook

#: Post releases and local builds (``0.5.23.post1``, ``0.5.23+rocm``) are in, and use the fingerprints of their base.
SUPPORTED = SpecifierSet(">=0.5.23,<0.5.24")
_STORE = Path(__file__).with_name("fingerprints.json")
_BODY_MATTERS = frozenset({"around", "replace", "value"})


@dataclass(frozen=True)
class Fingerprint:
    """``params`` is the parameter list as text; ``body`` a hash of the whole definition without its docstring."""

    params: str
    body: str


@dataclass(frozen=True)
class Problem:
    """One mismatch. ``str(problem)`` is the sentence for people."""

    target: str
    expected: str
    found: str
    sglang: str
    remedy: str

    def __str__(self) -> str:
        return (
            f"{self.target}: expected {self.expected}; found {self.found} in SGLang {self.sglang} "
            f"(supported: {SUPPORTED}). {self.remedy}"
        )


def sglang_root() -> Path | None:
    """Directory of the ``sglang`` package that would be imported, or ``None``. Imports nothing."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def sglang_version(root: Path) -> str:
    """Version of the SGLang under ``root``: its ``_version.py``, or the metadata of the installed distribution."""
    file = root / "_version.py"
    if file.exists() and (match := re.search(r"^__version__.*?['\"]([^'\"]+)['\"]", file.read_text(), re.MULTILINE)):
        return match[1]
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def problems(groups: Collection[str], root: Path | None = None, hooks: Iterable[Hook] = HOOKS) -> list[Problem]:
    """Everything that keeps the hooks of ``groups`` from being applied safely; empty means that they fit.

    Args:
        groups: hook groups that are wanted, for example ``{"core", "cpu"}``.
        root: directory of the ``sglang`` package; by default the one that would be imported.
        hooks: the table.
    """
    root = root or sglang_root()
    if root is None:
        remedy = "Install it (see the README), or set SGLANG_DFLASH_ROCM=0."
        return [Problem("sglang", f"a release in {SUPPORTED}", "no package of that name", "none", remedy)]
    found = sglang_version(root)
    if not _supported(found):
        return [Problem("sglang", f"a release in {SUPPORTED}", f"release {found}", found, _remedy())]
    stored = load_fingerprints().get(Version(found).base_version, {})
    checks = (_compare(hook, stored.get(hook.target), root, found) for hook in hooks if hook.group in groups)
    return [problem for problem in checks if problem is not None]


def state(hook: Hook, root: Path) -> str:
    """``ok``, ``changed`` or ``missing``: one hook against the SGLang under ``root``, whatever its version says."""
    if isinstance(fingerprint(hook.target, root), str):
        return "missing"
    found = sglang_version(root)
    stored = load_fingerprints().get(_base_version(found), {})
    return "changed" if _compare(hook, stored.get(hook.target), root, found) else "ok"


def fingerprint(target: str, root: Path) -> Fingerprint | str:
    """Fingerprint of a dotted path such as ``sglang.srt.layers.dp_attention.memcpy``, or why there is none."""
    parts = target.split(".")
    if parts[0] != "sglang":
        return f"no such package: {parts[0]}"
    place, rest = root, parts[1:]
    while rest and (place / rest[0]).is_dir():
        place, rest = place / rest[0], rest[1:]
    file = place / f"{rest[0]}.py" if rest and (place / f"{rest[0]}.py").exists() else place / "__init__.py"
    names = rest[1:] if file.name != "__init__.py" else rest
    if not file.exists() or not names:
        return f"no module {target.rpartition('.')[0]}"
    body: list[ast.stmt] = ast.parse(file.read_text()).body
    node: ast.AST | None = None
    for depth, name in enumerate(names):
        node = _definition(body, name)
        if node is None:
            return f"no {name} in {'.'.join(parts[: len(parts) - len(names) + depth])}"
        body = getattr(node, "body", [])
    return Fingerprint(_params(node), hashlib.sha256(_normal(node).encode()).hexdigest()[:16])


def load_fingerprints() -> dict[str, dict[str, Fingerprint]]:
    """Stored fingerprints: release -> target -> fingerprint."""
    raw = json.loads(_STORE.read_text()) if _STORE.exists() else {}
    return {
        release: {target: Fingerprint(**entry) for target, entry in targets.items()} for release, targets in raw.items()
    }


def changed_fingerprints(root: Path, hooks: Iterable[Hook] = HOOKS) -> tuple[str, dict[str, Fingerprint], list[str]]:
    """Release, its fingerprints as they are now, and one line per difference from the stored ones.

    Raises:
        LookupError: a target does not exist in this release; the table has to change first.
    """
    release = _base_version(sglang_version(root))
    stored = load_fingerprints().get(release, {})
    now: dict[str, Fingerprint] = {}
    for target in sorted({hook.target for hook in hooks}):
        found = fingerprint(target, root)
        if isinstance(found, str):
            raise LookupError(f"{target}: {found} (SGLang {release}); correct or remove its line of hook_table.py")
        now[target] = found
    lines = [f"added    {target}" for target in now if target not in stored]
    lines += [f"removed  {target}" for target in stored if target not in now]
    for target in now.keys() & stored.keys():
        if now[target].params != stored[target].params:
            lines.append(f"params   {target}: {stored[target].params} -> {now[target].params}")
        elif now[target] != stored[target]:
            lines.append(f"body     {target}")
    return release, now, sorted(lines)


def store_fingerprints(release: str, now: dict[str, Fingerprint]) -> None:
    """Write the fingerprints of one release beside those of the others."""
    raw = json.loads(_STORE.read_text()) if _STORE.exists() else {}
    raw[release] = {target: asdict(print_) for target, print_ in sorted(now.items())}
    _STORE.write_text(json.dumps(raw, indent=1, sort_keys=True) + "\n")


def _compare(hook: Hook, stored: Fingerprint | None, root: Path, found_version: str) -> Problem | None:
    found = fingerprint(hook.target, root)
    remedy = _remedy()
    if isinstance(found, str):
        wanted = f"a definition with parameters {stored.params}" if stored else "a definition"
        return Problem(hook.target, wanted, found, found_version, remedy)
    if stored is None:
        remedy = "Run `dflash-rocm fingerprints --write` after reading the target."
        return Problem(hook.target, "a stored fingerprint", "none", found_version, remedy)
    if found.params != stored.params:
        return Problem(hook.target, f"parameters {stored.params}", f"parameters {found.params}", found_version, remedy)
    if hook.kind in _BODY_MATTERS and found.body != stored.body:
        return Problem(
            hook.target, f"the body with hash {stored.body}", f"a body with hash {found.body}", found_version, remedy
        )
    return None


def _remedy() -> str:
    return (
        f"Install a supported release (pip install --no-deps 'sglang{SUPPORTED}'), update sglang-dflash-rocm, "
        "or set SGLANG_DFLASH_ROCM=0 to run without it."
    )


def _supported(text: str) -> bool:
    try:
        found = Version(text)
    except InvalidVersion:
        return False
    return SUPPORTED.contains(Version(found.public), prereleases=found.is_postrelease)


def _base_version(text: str) -> str:
    try:
        return Version(text).base_version
    except InvalidVersion:
        return text


def _definition(body: list[ast.stmt], name: str) -> ast.AST | None:
    """The last definition of ``name`` in a module or class body, also under ``if`` and ``try``."""
    found = None
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            found = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                found = node
        elif isinstance(node, ast.ImportFrom) and any(name == (alias.asname or alias.name) for alias in node.names):
            found = node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            handled = [statement for handler in getattr(node, "handlers", []) for statement in handler.body]
            inner = [*node.body, *handled, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
            found = _definition(inner, name) or found
    return found


def _params(node: ast.AST) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"({ast.unparse(node.args)})"
    return "" if isinstance(node, ast.ClassDef) else "= ..."


def _normal(node: object) -> str:
    """Text of a syntax tree without positions, docstrings and empty fields, the same on every Python we run on."""
    if isinstance(node, list):
        return f"[{','.join(map(_normal, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            value = value[1:] if ast.get_docstring(node, clean=False) is not None else value
        # Python 3.12 added fields that are empty for code that older releases can parse.
        if value not in (None, []):
            fields.append(f"{name}={_normal(value)}")
    return f"{type(node).__name__}({','.join(fields)})"
