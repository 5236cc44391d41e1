"""What ``dflash-rocm check`` finds out: versions, every hook with its state, what given server flags would get."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sglang_dflash_rocm import __version__, checkpoint, compat, environ, gate
from sglang_dflash_rocm.hook_table import HOOKS

#: Distributions by the name under which people know them; the first that is installed counts.
_PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton-rocm", "triton-rocm"),
    "aiter": ("amd-aiter", "aiter"),
    "flydsl": ("flydsl",),
    "transformers": ("transformers",),
}

_LIVE = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang_dflash_rocm import plugin
json.dump([entry.hook.target for entry in plugin.installed], sys.stdout)
"""

_TORCH = """
import json, sys, torch
json.dump({"hip": torch.version.hip, "cuda": torch.version.cuda}, sys.stdout)
"""


@dataclass
class Findings:
    """``problems`` empty means that everything which is asked for would work as far as a check can tell."""

    versions: dict[str, str]
    hooks: list[dict[str, str]]
    features: list[dict[str, str]]
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_json(self) -> dict:
        return {"ok": self.ok, **asdict(self)}


def examine(
    env: Mapping[str, str],
    server_flags: Sequence[str],
    live: bool = True,
    model: Path | None = None,
    draft: Path | None = None,
) -> Findings:
    """Look at this environment as a server started in it with ``server_flags`` would find it.

    Args:
        env: the environment variables.
        server_flags: arguments of ``sglang.launch_server``.
        live: also run SGLang's plugin loader in a process of its own (about 10 s) and ask which hooks were applied.
        model: a checkpoint to look at, for the TP and DP of ``server_flags``.
        draft: its DFlash draft.
    """
    findings = Findings(_versions(), [], [])
    root = compat.sglang_root()
    try:
        enabled = environ.SGLANG_DFLASH_ROCM.get(env)
        requests = gate.requested(env, server_flags)
    except ValueError as error:
        findings.problems.append(str(error))
        return findings
    wanted = {"core"} | {request.group for request in requests if request.group}
    # Without a request the static check covers everything that could be asked for.
    findings.problems += map(str, compat.problems({hook.group for hook in HOOKS} if not requests else wanted))
    for request in requests:
        state = "refused" if request.refusal else "warning" if request.warning else "active"
        text = request.refusal or request.warning
        findings.features.append({"feature": request.feature, "by": request.source, "state": state, "note": text})
        if request.refusal:
            findings.problems.append(f"{request.source}: {request.refusal}")
    if not enabled:
        findings.notes.append("SGLANG_DFLASH_ROCM=0: the plugin does nothing")
    findings.notes += _loader_notes(env)
    if requests and (not enabled or gate.plugin_list_excludes_us(env)):
        findings.problems += [f"{r.source} is asked for, but the plugin is switched off" for r in requests]
    applied = _applied(env, server_flags, findings) if live and root and not findings.problems else None
    for hook in HOOKS:
        row = {"target": hook.target, "kind": hook.kind, "group": hook.group}
        row["static"] = compat.state(hook, root) if root else "missing"
        row["live"] = _live_state(hook, wanted, applied)
        findings.hooks.append(row)
        if row["live"] == "not applied":
            findings.problems.append(f"{hook.target}: the hook was not applied")
    findings.problems += _checkpoint_problems(model, draft, server_flags)
    return findings


def _checkpoint_problems(model: Path | None, draft: Path | None, server_flags: Sequence[str]) -> list[str]:
    if model is None:
        return []
    try:
        return checkpoint.problems(model, draft, *checkpoint.deployment(server_flags))
    except ValueError as error:
        return [str(error)]


def _live_state(hook, wanted: set[str], applied: list[str] | None) -> str:
    if applied is None:
        return "not run"
    if hook.kind == "reads":
        return "relied on"
    if hook.group not in wanted:
        return "not asked for"
    return "applied" if hook.target in applied else "not applied"


def _applied(env: Mapping[str, str], server_flags: Sequence[str], findings: Findings) -> list[str] | None:
    if not environ.SGLANG_DFLASH_ROCM.get(env) or gate.plugin_list_excludes_us(env):
        return None
    run = subprocess.run(
        [sys.executable, "-c", _LIVE, *server_flags], env={**os.environ, **env}, capture_output=True, text=True
    )
    try:
        if run.returncode == 0:
            return json.loads(run.stdout.splitlines()[-1])
        reason = run.stderr.strip().splitlines()[-4:]
    except (ValueError, IndexError):
        reason = [run.stdout[-300:]]
    findings.problems.append("SGLang's plugin loader failed: " + " | ".join(reason))
    return None


def _loader_notes(env: Mapping[str, str]) -> list[str]:
    notes = []
    if reason := gate.plugin_list_excludes_us(env):
        notes.append(f"{reason}; SGLang will not load the plugin")
    selected = env.get("SGLANG_PLATFORM", "")
    if selected and selected != gate.PLATFORM_NAME:
        notes.append(
            f"SGLANG_PLATFORM={selected}: SGLang skips the plugins of every package that offers another platform, ours "
            "included"
        )
    return notes


def _versions() -> dict[str, str]:
    root = compat.sglang_root()
    found = {
        "sglang-dflash-rocm": __version__,
        "python": platform.python_version(),
        "sglang": compat.sglang_version(root) if root else "not installed",
    }
    for name, distributions in _PACKAGES.items():
        found[name] = next((v for d in distributions if (v := _version(d))), "not installed")
    found["gpu"] = "gfx942" if gate.gfx942_present() else "no gfx942"
    run = subprocess.run([sys.executable, "-c", _TORCH], capture_output=True, text=True)
    build = json.loads(run.stdout) if run.returncode == 0 else {}
    found["rocm"], found["cuda"] = build.get("hip") or "no", build.get("cuda") or "no"
    return found


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
