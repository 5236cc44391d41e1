"""Is anything of ours asked for, and by what? Decides whether a broken contract stops the start or is ignored."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflash_rocm import compat, environ

logger = logging.getLogger(__name__)

#: Name of the platform's entry point and value of ``SGLANG_PLATFORM`` that selects it.
PLATFORM_NAME = "dflash_cpu"

#: Name of our entry point in group ``sglang.srt.plugins``, as ``SGLANG_PLUGINS`` lists it.
PLUGIN_NAME = "dflash_rocm"
_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_GFX942 = "90402"
_BACKEND_FLAGS = ("--attention-backend", "--decode-attention-backend", "--prefill-attention-backend")
#: From the launcher to its workers: hook groups that only the resolved arguments asked for.
_LATE_GROUPS = "SGLANG_DFLASH_ROCM_LATE_GROUPS"
_DRAFT_BACKEND_FLAG = "--speculative-draft-attention-backend"
_TAKEOVER = "SGLANG_AITER_PA_DECODE_IMPL=flydsl"


@dataclass(frozen=True)
class Request:
    """``feature`` is asked for by ``source`` (a flag or variable with its value).

    ``group`` names the hooks that serve it, empty if there are none; ``refusal`` says why it cannot be had at all, and
    ``warning`` what the user should know although the server may start.
    """

    feature: str
    source: str
    group: str = ""
    refusal: str = ""
    warning: str = ""


def requested(env: Mapping[str, str], argv: Sequence[str], gfx942: bool | None = None) -> list[Request]:
    """What the environment and the command line ask for. ``argv`` is inherited by every process SGLang spawns.

    Args:
        gfx942: whether such a GPU is present; ``None`` looks.

    Raises:
        ValueError: a variable of ours has a value that is not allowed.
    """
    flags = server_flags(argv)
    found = []
    if env.get("SGLANG_PLATFORM") == PLATFORM_NAME:
        found.append(Request("CPU platform", f"SGLANG_PLATFORM={PLATFORM_NAME}", group="cpu"))
        if environ.SGLANG_DFLASH_CPU_GRAPH.get(env):
            found.append(Request("graphs on the CPU platform", "SGLANG_DFLASH_CPU_GRAPH=1", group="cpu_graph"))
    for flag in (*_BACKEND_FLAGS, _DRAFT_BACKEND_FLAG):
        if flags.get(flag) == "flydsl":
            found.append(_flydsl(f"{flag} flydsl", env, gfx942))
    if environ.SGLANG_AITER_PA_DECODE_IMPL.get(env) == "flydsl":
        found.append(_flydsl(_TAKEOVER, env, gfx942))
    if flags.get("--speculative-algorithm", "").upper() == "DFLASH":
        found += _dflash(env, gfx942, flags.get("--attention-backend"))
    for group in filter(None, env.get(_LATE_GROUPS, "").split(",")):
        found.append(Request(group, "the resolved server arguments", group=group))
    for variable in environ.VARIABLES:
        if variable.is_set(env) and variable.group:
            found.append(Request(variable.doc, f"{variable.name}={env[variable.name]}", group=variable.group))
    return found


def requested_by(server_args: Any, env: Mapping[str, str], gfx942: bool | None = None) -> list[Request]:
    """The same question put to resolved server arguments."""
    argv = []
    for flag in (*_BACKEND_FLAGS, _DRAFT_BACKEND_FLAG, "--speculative-algorithm"):
        value = getattr(server_args, flag.removeprefix("--").replace("-", "_"), None)
        argv += [flag, str(value)] if value else []
    return requested(env, argv, gfx942)


def check_resolved_server_args(_result: None, server_args: Any) -> None:
    """AFTER ``check_server_args``, in the launcher: what only a config file or the Python engine said.

    The workers are told through the environment which hooks that takes; they look at ``sys.argv`` like this process.

    Raises:
        SystemExit: a feature is asked for that this version does not have, or its contract with SGLang does not hold.
    """
    from sglang.srt.arg_groups.overrides import resolved_view

    resolved = resolved_view(server_args)
    check_takeover(resolved, os.environ)
    known = {request.source for request in requested(os.environ, sys.argv)}
    late = [r for r in requested_by(resolved, os.environ) if r.source not in known]
    groups = {request.group for request in late if request.group}
    if found := compat.problems(groups):
        stop([f"asked for by {', '.join(request.source for request in late)}", *found])
    refuse_and_warn(late)
    if groups:
        os.environ[_LATE_GROUPS] = ",".join(sorted(groups))


def check_takeover(resolved: Any, env: Mapping[str, str]) -> None:
    """Stop if aiter is to be taken over in a server that has it nowhere: the variable would do nothing.

    Raises:
        SystemExit: neither aiter nor flydsl is among the resolved backends.
    """
    if environ.SGLANG_AITER_PA_DECODE_IMPL.get(env) != "flydsl":
        return
    fields = [flag.removeprefix("--").replace("-", "_") for flag in (*_BACKEND_FLAGS, _DRAFT_BACKEND_FLAG)]
    used = {getattr(resolved, field, None) for field in fields} - {None}
    if not used & {"aiter", "flydsl"}:
        reason = f"{_TAKEOVER}: this server's attention is {', '.join(sorted(used))}"
        stop([f"{reason}; unset it, or use --attention-backend aiter or flydsl"])


def refuse_and_warn(requests: Sequence[Request]) -> None:
    """Stop on the first feature that cannot be had; log what the user should know about the others."""
    refusals = [f"{request.source}: {request.refusal}" for request in requests if request.refusal]
    if refusals:
        stop(refusals)
    for request in requests:
        if request.warning:
            logger.warning("sglang-dflash-rocm: %s: %s", request.source, request.warning)


def stop(reasons: Sequence[object]) -> None:
    """End the process with the reasons on stderr. SGLang swallows a plugin's ``Exception``, not a ``SystemExit``."""
    print(
        "\n".join(["sglang-dflash-rocm refuses to start:", *(f"  - {reason}" for reason in reasons)]), file=sys.stderr
    )
    raise SystemExit(3)


def cpu_platform_blockers(env: Mapping[str, str]) -> list[str]:
    """Why the CPU platform's hooks would not be installed although the platform is selected."""
    found = []
    if not environ.SGLANG_DFLASH_ROCM.get(env):
        found.append("SGLANG_DFLASH_ROCM=0 turns off the hooks that it needs: unset it")
    if reason := plugin_list_excludes_us(env):
        found.append(reason)
    return found


def plugin_list_excludes_us(env: Mapping[str, str]) -> str:
    """A sentence if ``SGLANG_PLUGINS`` keeps SGLang from loading us, else an empty string."""
    listed = [name.strip() for name in env.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if listed and PLUGIN_NAME not in listed:
        return f"SGLANG_PLUGINS={env['SGLANG_PLUGINS']} leaves out {PLUGIN_NAME}: add it to the list"
    return ""


def gfx942_present(nodes: Path = _KFD_NODES) -> bool:
    """Whether the kernel driver lists a gfx942 GPU. Reads sysfs, because asking HIP would initialise it."""
    for properties in nodes.glob("*/properties"):
        try:
            lines = properties.read_text().splitlines()
        except OSError:
            continue
        if f"gfx_target_version {_GFX942}" in lines:
            return True
    return False


def _flydsl(source: str, env: Mapping[str, str], gfx942: bool | None) -> Request:
    """The CPU platform registers the backend itself, with the reference in place of the kernels."""
    if env.get("SGLANG_PLATFORM") == PLATFORM_NAME:
        return Request("FlyDSL attention", source, group="flydsl")
    if gfx942_present() if gfx942 is None else gfx942:
        warning = (
            "its kernels ran on the simulator and its backend on the CPU platform, neither on a GPU so far; "
            "--attention-backend triton is what SGLang has"
        )
        return Request("FlyDSL attention", source, group="flydsl", warning=warning)
    reason = (
        "there is no gfx942 GPU (MI300X) here; use another backend, or SGLANG_PLATFORM=dflash_cpu to try it without"
    )
    return Request("FlyDSL attention", source, refusal=reason)


def _dflash(env: Mapping[str, str], gfx942: bool | None, backend: str | None) -> list[Request]:
    """Group ``dflash`` mends what is wrong on gfx942, group ``budget`` reports; elsewhere DFLASH alone asks nothing."""
    source = "--speculative-algorithm DFLASH"
    table = Request("DFLASH memory table", source, group="budget")
    if env.get("SGLANG_PLATFORM") == PLATFORM_NAME:
        return [Request("DFLASH on the CPU platform", source, group="dflash"), table]
    if gfx942_present() if gfx942 is None else gfx942:
        warning = ""
        if backend == "aiter" and environ.SGLANG_AITER_PA_DECODE_IMPL.get(env) != "flydsl":
            warning = (
                "on gfx942 SGLang's aiter attention is wrong or crashes for MiMo's 192/128 heads; leave the flag out, "
                f"use --attention-backend flydsl or triton, or set {_TAKEOVER}"
            )
        return [Request("DFLASH on gfx942", source, group="dflash", warning=warning), table]
    return [table] if environ.SGLANG_DFLASH_BUDGET_TABLE.get(env) else []


def server_flags(argv: Sequence[str]) -> dict[str, str]:
    """``--flag value`` and ``--flag=value``; the last one counts, as for argparse."""
    flags = {}
    for here, following in itertools.pairwise([*argv, ""]):
        if here.startswith("--"):
            name, equals, value = here.partition("=")
            flags[name.replace("_", "-")] = value if equals else following
    return flags
