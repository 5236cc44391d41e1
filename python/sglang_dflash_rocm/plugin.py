"""``register()``, which SGLang calls in every process, and the proof that the hooks it asked for are in place."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dflash_rocm import __version__, compat, environ, gate
from sglang_dflash_rocm.hook_table import HOOKS, Hook

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Installed:
    """A hook that was handed to SGLang: our object and what stood at the target before."""

    hook: Hook
    ours: Any
    before: Any


#: What :func:`register` installed in this process, for ``dflash-rocm check``.
installed: list[Installed] = []


def register() -> None:
    """Entry point ``dflash_rocm`` of group ``sglang.srt.plugins``.

    Nothing of ours asked for: only the ``core`` hooks, which look at the server arguments. Something asked for: the
    hooks of its group as well, or the process ends with the reasons.

    Raises:
        SystemExit: asked for, but the contract with SGLang does not hold, a variable has a wrong value, or the feature
            is not in this version.
    """
    try:
        if not environ.SGLANG_DFLASH_ROCM.get():
            logger.debug("sglang-dflash-rocm: switched off by SGLANG_DFLASH_ROCM")
            return
        requests = gate.requested(os.environ, sys.argv)
    except ValueError as error:
        gate.stop([error])
    groups = {"core"} | {request.group for request in requests if request.group}
    found = compat.problems(groups)
    if found and requests:
        gate.stop([f"asked for by {', '.join(request.source for request in requests)}", *found])
    if found:
        # Nothing asked for, nothing said, unless something would have been done here: a file might ask that we cannot
        # look into without the core hooks, and on gfx942 they choose the attention backend of MiMo-V2.
        may_ask = any(flag.startswith("--config") for flag in sys.argv) or gate.gfx942_present()
        level = logging.WARNING if may_ask else logging.DEBUG
        logger.log(level, "sglang-dflash-rocm does nothing: %s", "; ".join(map(str, found)))
        return
    gate.refuse_and_warn(requests)
    install([hook for hook in HOOKS if hook.group in groups and hook.kind != "reads"])
    if gate.gfx942_present() and os.environ.get("SGLANG_PLATFORM") != gate.PLATFORM_NAME:
        # In every process, because the launcher may choose it for a model that names no backend.
        from sglang_dflash_rocm.srt.layers.attention import flydsl_registry

        flydsl_registry.register()


def install(hooks: Sequence[Hook]) -> None:
    """Hand the hooks to SGLang and arrange for them to be verified once SGLang has applied them."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        ours = _load(hook.impl)
        owner, name = _owner(hook.target)
        installed.append(Installed(hook, ours, getattr(owner, name)))
        if hook.kind == "value":
            setattr(owner, name, ours)
        else:
            HookRegistry.register(hook.target, ours, HookType(hook.kind))
    _verify_after_application(HookRegistry)


def _verify_after_application(registry: Any) -> None:
    """Wrap ``apply_hooks`` for one call. SGLang calls it once, after all plugins, and nothing after it; calling it here
    ourselves would make SGLang skip hooks that other plugins put on the same targets later."""
    original = registry.__dict__["apply_hooks"]

    def apply_and_verify(cls: Any) -> None:
        registry.apply_hooks = original
        registry.apply_hooks()
        if failures := list(unapplied()):
            gate.stop(["hooks are registered but not in place", *failures])
        _announce()

    registry.apply_hooks = classmethod(apply_and_verify)


def _announce() -> None:
    """One line per process in which hooks were asked for; on stderr where SGLang has not set up logging yet."""
    groups = sorted({entry.hook.group for entry in installed} - {"core"})
    if not groups:
        return
    release = compat.sglang_version(compat.sglang_root())
    line = f"sglang-dflash-rocm {__version__} on SGLang {release}: hooks active: {len(installed)} ({', '.join(groups)})"
    if logging.getLogger().handlers and logger.isEnabledFor(logging.INFO):
        logger.info(line)
    else:
        print(f"{line}, process {os.getpid()}", file=sys.stderr)


def unapplied() -> Iterator[str]:
    """One sentence for each installed hook that calls of its target do not reach."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    for entry in installed:
        owner, name = _owner(entry.hook.target)
        current = getattr(owner, name)
        if entry.hook.kind == "value":
            if current is not entry.ours:
                yield f"{entry.hook.target}: is {current!r}, should be {entry.ours!r}"
        elif entry.hook.target not in HookRegistry._patched:
            yield f"{entry.hook.target}: SGLang did not apply the hook (its log says why)"
        elif not _leads_to(current, entry.ours):
            yield f"{entry.hook.target}: what stands there now does not call {entry.hook.impl}"
    replaced = {id(entry.before): entry.hook for entry in installed if entry.hook.kind != "value"}
    for place, hook in _stale_references(replaced):
        yield f"{hook.target}: {place} still holds the function from before the hook"


def _leads_to(function: Any, ours: Any) -> bool:
    """Whether ``ours`` is in a closure of ``function`` or of what it wraps; SGLang's wrappers keep the hook there."""
    while function is not None:
        function = getattr(function, "__func__", function)
        if any(_cell(cell) is ours for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _stale_references(replaced: dict[int, Hook]) -> Iterator[tuple[str, Hook]]:
    """Module-level tables, partials and default arguments of SGLang that hold one of the replaced functions.

    SGLang re-binds plain module attributes by itself and nothing else.
    """
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("sglang.") or not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            for held in _held(value):
                if id(held) in replaced:
                    yield f"{module_name}.{name}", replaced[id(held)]


def _held(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif isinstance(value, functools.partial):
        yield value.func
    elif isinstance(value, types.FunctionType):
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()


def _owner(target: str) -> tuple[Any, str]:
    path, _, name = target.rpartition(".")
    return pkgutil.resolve_name(path), name


def _load(impl: str) -> Callable | Any:
    module, _, name = impl.partition(":")
    return getattr(importlib.import_module(module), name)
