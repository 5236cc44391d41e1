"""A plugin that breaks SGLang on purpose, to see that our checks notice. Loaded only by ``test_failures.py``."""

from __future__ import annotations

import os

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

WORKER = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"
MEMCPY = "sglang.srt.layers.dp_attention.memcpy"


def install() -> None:
    """Activate the fault that ``DFLASH_FAULT`` names."""
    FAULTS[os.environ["DFLASH_FAULT"]]()


def extra_token() -> None:
    """Verify accepts one draft more than the target agrees with."""

    def one_more(result, candidates, *args, **kwargs):
        correct, bonus = result
        return (correct + 1).clamp(max=candidates.shape[1] - 1), bonus

    target = "sglang.kernels.ops.speculative.dflash.compute_dflash_correct_drafts_and_bonus"
    HookRegistry.register(target, one_more, HookType.AFTER)


def wrong_embedding() -> None:
    """The draft's full copy of the embedding has its rows shifted by one."""
    target = "sglang.srt.speculative.dflash_dp.gather_draft_embedding"
    HookRegistry.register(target, lambda table, *_a, **_k: table.roll(1, 0), HookType.AFTER)


def no_draft_kv() -> None:
    """The draft's KV of committed tokens is never written."""
    target = f"{WORKER}._append_target_hidden_to_draft_kv_by_loc"
    HookRegistry.register(target, lambda *_a, **_k: None, HookType.REPLACE)


def idle_skips_verify() -> None:
    """An idle DP rank leaves out its empty verify forward, in whose collectives the others wait for it."""

    class SkipsVerify:
        def __init__(self, worker):
            self._worker = worker

        def __getattr__(self, name):
            return getattr(self._worker, name)

        def forward_batch_generation(self, *args, **kwargs):
            return None if kwargs.get("is_verify") else self._worker.forward_batch_generation(*args, **kwargs)

    def forward(original, worker, batch, *args, **kwargs):
        if batch is None or not batch.forward_mode.is_idle():
            return original(worker, batch, *args, **kwargs)
        target = worker._target_worker
        worker._target_worker = SkipsVerify(target)
        try:
            return original(worker, batch, *args, **kwargs)
        finally:
            worker._target_worker = target

    HookRegistry.register(f"{WORKER}.forward_batch_generation", forward, HookType.AROUND)


def hook_dropped() -> None:
    """A hook of ours is registered but never reaches the registry, as after a rename that nobody noticed."""
    register = HookRegistry.register.__func__

    def lossy(cls, target, *args, **kwargs):
        if target != MEMCPY:
            register(cls, target, *args, **kwargs)

    HookRegistry.register = classmethod(lossy)


def hook_overwritten() -> None:
    """A hook of ours is applied and then lost, because somebody else assigns the name again."""
    apply = HookRegistry.apply_hooks.__func__

    def apply_and_undo(cls):
        from sglang.srt.layers import dp_attention

        original = dp_attention.memcpy
        apply(cls)
        dp_attention.memcpy = original

    HookRegistry.apply_hooks = classmethod(apply_and_undo)


def without_hook() -> None:
    """Our package installs all its hooks but the one that ``DFLASH_WITHOUT`` names."""
    from sglang_dflash_rocm import plugin

    install = plugin.install
    plugin.install = lambda hooks: install([hook for hook in hooks if hook.target != os.environ["DFLASH_WITHOUT"]])


FAULTS = {
    fault.__name__: fault
    for fault in (
        extra_token,
        wrong_embedding,
        no_draft_kv,
        idle_skips_verify,
        hook_dropped,
        hook_overwritten,
        without_hook,
    )
}
