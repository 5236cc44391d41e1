"""The command line: `inspect` a code object, `diff` two saved cost reports. Errors are one line and exit code 2."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .code_object import CodeObject
from .cost_model import CLASSES, instruction_class
from .cost_report import CostReport
from .decode import decode
from .errors import BadCodeObject, SimulationError, UnknownInstruction
from .translate import translate

_TOP = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except SimulationError as error:
        print(f"gfx942sim: {error}", file=sys.stderr)
    except OSError as error:
        print(f"gfx942sim: {error.filename}: {error.strerror}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gfx942sim", description="gfx942 code objects without a GPU")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    inspect = commands.add_parser("inspect", help="resources and static instruction mix of each kernel of a file")
    inspect.add_argument("file", metavar="FILE.hsaco", type=Path)
    inspect.set_defaults(run=_inspect)
    diff = commands.add_parser("diff", help="compare two cost reports saved with CostReport.save")
    diff.add_argument("a", metavar="A", type=Path)
    diff.add_argument("b", metavar="B", type=Path)
    diff.set_defaults(run=_diff)
    for command in (inspect, diff):
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def describe(code: CodeObject, kernel: str) -> dict[str, Any]:
    """Resources and static instruction mix of one kernel.

    Keys: kernel; resources (see code_object.Resources); max_block (work-items); waves_per_simd (at that block, without
    dynamic LDS); instructions; classes (class -> count); mnemonics (count of each, most frequent first); unsupported
    (what the simulator would refuse: text -> count). Not counted are the padding after the last s_endpgm and the 256
    bytes at the start for firmware that cannot preload arguments.
    """
    resources = code.resources(kernel)
    max_block = code.kernels[kernel].get(".max_flat_workgroup_size", 1024)
    descriptor = code.descriptor(kernel)
    classes, mnemonics, unsupported = Counter(), Counter(), Counter()
    at, end = descriptor.entry + (256 if descriptor.preload_dwords else 0), descriptor.entry + resources.code
    pending: list[tuple[str, str]] = []
    while at < end:
        try:
            instruction = decode(code.image, at)
        except UnknownInstruction:
            unsupported["no CDNA encoding"] += 1
            at += 4
            continue
        try:
            translate(instruction, descriptor)
        except SimulationError:
            unsupported[instruction.mnemonic] += 1
        pending.append((instruction_class(instruction), instruction.mnemonic))
        if not _is_padding(instruction.mnemonic):
            for kind, mnemonic in pending:
                classes[kind] += 1
                mnemonics[mnemonic] += 1
            pending.clear()
        at += instruction.size
    return {
        "kernel": kernel,
        "resources": dataclasses.asdict(resources),
        "max_block": max_block,
        "waves_per_simd": resources.waves_per_simd(max_block),
        "instructions": sum(classes.values()),
        "classes": {kind: classes[kind] for kind in CLASSES if classes[kind]},
        "mnemonics": dict(mnemonics.most_common()),
        "unsupported": dict(unsupported.most_common()),
    }


def _is_padding(mnemonic: str) -> bool:
    return mnemonic in ("s_nop", "s_code_end")


def _inspect(options: argparse.Namespace) -> int:
    try:
        code = CodeObject.from_file(options.file)
        found = [describe(code, kernel) for kernel in sorted(code.kernels)]
    except BadCodeObject as error:
        raise BadCodeObject(f"{options.file}: {error.message}") from None
    except OSError:
        raise
    except Exception as error:  # a truncated file can fail anywhere in the ELF and metadata readers
        raise BadCodeObject(f"{options.file}: damaged code object ({type(error).__name__}: {error})") from None
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    for kernel in found:
        _print_kernel(kernel)
    return 0


def _print_kernel(found: dict[str, Any]) -> None:
    r = found["resources"]
    print(found["kernel"])
    print(
        f"  registers   {r['vgpr']} VGPR (of them {r['agpr']} AGPR), {r['sgpr']} SGPR; "
        f"spilled {r['vgpr_spills']} VGPR, {r['sgpr_spills']} SGPR"
    )
    print(f"  bytes       LDS {r['lds']}, scratch {r['scratch']} per lane, arguments {r['kernarg']}, code {r['code']}")
    print(f"  waves       {found['waves_per_simd']} per SIMD at the largest block of {found['max_block']} work-items")
    mix = ", ".join(f"{kind} {count}" for kind, count in found["classes"].items())
    print(f"  instructions {found['instructions']} in the file: {mix}")
    for mnemonic, count in list(found["mnemonics"].items())[:_TOP]:
        print(f"    {count:7d}  {mnemonic}")
    if len(found["mnemonics"]) > _TOP:
        print(f"             and {len(found['mnemonics']) - _TOP} other mnemonics")
    if found["unsupported"]:
        print("  not simulated: " + ", ".join(f"{name} ({count})" for name, count in found["unsupported"].items()))


def _diff(options: argparse.Namespace) -> int:
    first, second = (CostReport.load(path).figures() for path in (options.a, options.b))
    rows = []
    for name in dict.fromkeys([*first, *second]):
        a, b = first.get(name, 0), second.get(name, 0)
        rows.append({"figure": name, "a": a, "b": b, "ratio": b / a if a else None})
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    width = max(len(row["figure"]) for row in rows)
    print(f"{'whole grid; bounds are no timings':{width}s} {'A':>18s} {'B':>18s} {'B/A':>8s}")
    for row in rows:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        print(f"{row['figure']:{width}s} {_number(row['a']):>18s} {_number(row['b']):>18s} {ratio:>8s}")
    return 0


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3f}"
