"""``docs/patches.md``, rendered from the hook table."""

from __future__ import annotations

from pathlib import Path

from sglang_dflash_rocm.compat import SUPPORTED
from sglang_dflash_rocm.environ import VARIABLES
from sglang_dflash_rocm.hook_table import HOOKS

_GROUPS = {
    "core": "In every process that loads the plugin. They look; only `choose_backend` acts (gfx942, flydsl).",
    "budget": "A report: DFLASH on gfx942, on the CPU platform, or anywhere with `SGLANG_DFLASH_BUDGET_TABLE=1`.",
    "cpu": "Only under `SGLANG_PLATFORM=dflash_cpu`.",
    "cpu_graph": "Only under `SGLANG_PLATFORM=dflash_cpu` with `SGLANG_DFLASH_CPU_GRAPH=1`.",
    "dflash": "With `--speculative-algorithm DFLASH` on gfx942 or on the CPU platform.",
    "flydsl": "With the flydsl attention backend.",
    "draft_graph": "Only with `SGLANG_DFLASH_DRAFT_GRAPH=on` or `off`.",
    "idle_verify": "Only with `SGLANG_DFLASH_IDLE_VERIFY_GRAPH=1`.",
    "swa_interval": "Only with `SGLANG_DFLASH_SWA_TOKEN_INTERVAL` above 0.",
}


def page_path() -> Path | None:
    """``docs/patches.md`` of the checkout this package runs from, or ``None`` for an installed wheel."""
    docs = Path(__file__).parents[2] / "docs"
    return docs / "patches.md" if docs.is_dir() else None


def render() -> str:
    """The whole page."""
    lines = [
        "# What we hook in SGLang",
        "",
        "Generated from `hook_table.py` by `dflash-rocm fingerprints --write`; do not edit. "
        f"Supported: SGLang `{SUPPORTED}`.",
        "",
    ]
    for group in dict.fromkeys(hook.group for hook in HOOKS):
        lines += [f"## Group `{group}`", "", _GROUPS[group], ""]
        for hook in (hook for hook in HOOKS if hook.group == group):
            lines += [
                f"### `{hook.target.removeprefix('sglang.')}`",
                "",
                f"- kind: {hook.kind}{f', by `{hook.impl}`' if hook.impl else ''}",
                f"- why: {hook.why}",
                f"- upstream: `{hook.upstream}` (0.5.23)",
                f"- can go when: {hook.remove_when}",
                "",
            ]
    lines += ["## Environment variables", "", "| name | default | allowed | what |", "|---|---|---|---|"]
    lines += [f"| `{v.name}` | {v.default} | {v.allowed} | {v.doc} |" for v in VARIABLES]
    return "\n".join(lines) + "\n"
