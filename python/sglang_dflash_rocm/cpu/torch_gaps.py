"""What SGLang asks of torch on every device and torch has only on accelerators. Applied in worker processes of the
selected CPU platform and nowhere else."""

from __future__ import annotations

import torch

_NAMESPACE = "sglang::"
_mirror = None


def mirror_custom_ops() -> list[str]:
    """Give SGLang's custom ops a CPU kernel; returns the names that were added.

    ``direct_register_custom_op`` (``srt/utils/common.py:3001``) registers an out-of-tree platform's ops for
    ``PrivateUse1`` only, and our tensors are CPU tensors. Each op's CPU kernel re-dispatches to the one that SGLang
    registered. Idempotent; call again after more of SGLang was imported.
    """
    global _mirror
    if _mirror is None:
        _mirror = torch.library.Library(_NAMESPACE.removesuffix("::"), "IMPL")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    added = []
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith(_NAMESPACE) or has_kernel(name, "CPU") or not has_kernel(name, "PrivateUse1"):
            continue
        packet, _, overload = name.removeprefix(_NAMESPACE).partition(".")
        op = getattr(getattr(torch.ops.sglang, packet), overload or "default")
        _mirror.impl(op, _redispatch(op), "CPU")
        added.append(name)
    return added


def _redispatch(op):
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

    def kernel(*args, **kwargs):
        return op.redispatch(keys, *args, **kwargs)

    return kernel


def ignore_record_stream() -> None:
    """Make ``Tensor.record_stream`` a no-op: CPU tensors have no streams, and ``dflash_worker_v2.py:2481`` calls it."""
    torch.Tensor.record_stream = _no_stream


def _no_stream(tensor: torch.Tensor, stream: object) -> None:
    return None
