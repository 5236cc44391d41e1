"""``dflash-rocm plan``: what fits on the GPUs, before anything is started. Needs no GPU, torch or SGLang."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sglang_dflash_rocm.srt.mem_cache import draft_kv_budget as budget
from sglang_dflash_rocm.srt.mem_cache.draft_kv_budget import GIB, REST, STATIC, BudgetError

_KV_FLAG = {"bf16": "bf16", "fp8": "fp8_e4m3"}


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes per GPU, tokens per attention group. ``notes`` say what was assumed or looks wrong."""

    parts: list[budget.Part]
    full_tokens: int
    swa_tokens: int
    requests_per_group: int
    flags: list[str]
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict:
        return {
            **asdict(self),
            "parts": [{"name": p.name, "bytes": p.predicted, "memory": p.source, "flags": p.flags} for p in self.parts],
        }


@dataclass(frozen=True)
class Wanted:
    """The command's options; memory in bytes."""

    gpus: int
    gpu_memory: int
    tp: int
    dp: int
    kv_dtype: str
    fraction: float
    swa_ratio: float
    max_requests: int
    context_length: int | None
    page_size: int
    draft_window: int | None
    weights: int | None


def plan(
    model_config: Annotated[Path, typer.Option(help="the target's config.json, or its directory")],
    draft_config: Annotated[
        Path | None,
        typer.Option(help="the draft's config.json, or its directory [default: the released draft's shape]"),
    ] = None,
    gpus: Annotated[int, typer.Option(help="GPUs of one replica")] = 8,
    gpu_memory: Annotated[float, typer.Option(help="GiB of one GPU")] = 192.0,
    tp: Annotated[int | None, typer.Option(help="SGLang's --tp [default: --gpus]")] = None,
    dp: Annotated[int, typer.Option(help="SGLang's --dp: attention groups")] = 2,
    kv_cache_dtype: Annotated[str, typer.Option(help="bf16 or fp8, of target and draft")] = "bf16",
    mem_fraction_static: Annotated[float, typer.Option(help="share of a GPU for weights and KV pools")] = 0.85,
    swa_full_tokens_ratio: Annotated[float, typer.Option(help="SWA pool tokens per full pool token")] = 0.8,
    max_running_requests: Annotated[int, typer.Option(help="over all groups; SGLang's default for DFLASH")] = 48,
    context_length: Annotated[int | None, typer.Option(help="[default: the model's]")] = None,
    page_size: Annotated[int, typer.Option(help="tokens per KV page")] = 1,
    draft_window_size: Annotated[
        int | None, typer.Option(help="SGLang's --speculative-draft-window-size [default: not set]")
    ] = None,
    weights_gb: Annotated[
        float | None, typer.Option(help="GiB of target and draft weights on one GPU [default: not counted]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")] = False,
) -> None:
    """Bytes per GPU, tokens that fit, and SGLang's flags. Exits 1 if it does not fit, 2 for wrong options."""
    screen = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    try:
        wanted = Wanted(
            gpus=gpus,
            gpu_memory=int(gpu_memory * GIB),
            tp=gpus if tp is None else tp,
            dp=dp,
            kv_dtype=kv_cache_dtype,
            fraction=mem_fraction_static,
            swa_ratio=swa_full_tokens_ratio,
            max_requests=max_running_requests,
            context_length=context_length,
            page_size=page_size,
            draft_window=draft_window_size,
            weights=None if weights_gb is None else int(weights_gb * GIB),
        )
        target = budget.target_shape(read_config(model_config, "--model-config"))
        draft = budget.RELEASED_DRAFT
        if draft_config is not None:
            draft = budget.draft_shape(read_config(draft_config, "--draft-config"))
        _check(wanted, target, draft)
        made = make_plan(wanted, target, draft)
    except DoesNotFit as error:
        screen.print(str(error))
        raise typer.Exit(1) from None
    except BudgetError as error:
        screen.print(str(error))
        raise typer.Exit(2) from None
    if draft_config is None:
        text = "draft: the released one's shape (5 layers, 64 q / 8 KV heads of 128, block 8, SWA 1024); --draft-config"
        made.notes.insert(0, f"{text} takes another")
    if as_json:
        print(json.dumps(made.as_json(), indent=1))
    else:
        _show(made, wanted, Console(highlight=False))


class DoesNotFit(BudgetError):
    """The options are right, the memory is too small."""


def read_config(path: Path, flag: str) -> Mapping:
    """The JSON object of a ``config.json`` or of the one in a directory.

    Raises:
        BudgetError: no such file, or not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise BudgetError(f"{flag} {path}: {error.strerror}; give a model's directory or its config.json") from None
    except ValueError as error:
        raise BudgetError(f"{flag} {path}: not JSON ({error}); give a model's directory or its config.json") from None
    if not isinstance(config, dict):
        raise BudgetError(f"{flag} {path}: must hold a JSON object, holds a {type(config).__name__}")
    return config


def _check(wanted: Wanted, target: budget.TargetShape, draft: budget.DraftShape) -> None:
    for flag, value in (
        ("--gpus", wanted.gpus),
        ("--gpu-memory", wanted.gpu_memory / GIB),
        ("--tp", wanted.tp),
        ("--dp", wanted.dp),
        ("--max-running-requests", wanted.max_requests),
        ("--context-length", wanted.context_length),
        ("--page-size", wanted.page_size),
        ("--weights-gb", None if wanted.weights is None else wanted.weights / GIB),
    ):
        if value is not None and value <= 0:
            raise BudgetError(f"{flag} {value}: must be above 0")
    if wanted.kv_dtype not in _KV_FLAG:
        raise BudgetError(f"--kv-cache-dtype {wanted.kv_dtype}: must be one of {', '.join(_KV_FLAG)}")
    if not 0 < wanted.fraction < 1:
        raise BudgetError(f"--mem-fraction-static {wanted.fraction}: must be between 0 and 1, such as 0.85")
    if not 0 < wanted.swa_ratio <= 1:
        raise BudgetError(f"--swa-full-tokens-ratio {wanted.swa_ratio}: must be above 0 and at most 1")
    if wanted.draft_window is not None and wanted.draft_window < draft.block_size:
        raise BudgetError(f"--draft-window-size {wanted.draft_window}: must be at least the block, {draft.block_size}")
    if wanted.tp > wanted.gpus:
        raise BudgetError(f"--tp {wanted.tp}: must be at most --gpus {wanted.gpus}")
    allowed = [dp for dp in range(1, wanted.tp + 1) if _attention_tp_fits(wanted.tp, dp, target, draft)]
    if wanted.dp not in allowed:
        what = f"{target.q_heads} target and {draft.q_heads} draft heads"
        if target.fused_tp:
            what = f"the checkpoint's TP, {target.fused_tp} (num_key_value_heads; its fused QKV is interleaved for it)"
        fix = f"use --dp {' or '.join(map(str, allowed))}" if allowed else "use another --tp"
        attn_tp = f"{wanted.tp / wanted.dp:g}"
        raise BudgetError(
            f"--tp {wanted.tp} --dp {wanted.dp}: attention TP = tp/dp = {attn_tp} must divide {what}; {fix}"
        )


def _attention_tp_fits(tp: int, dp: int, target: budget.TargetShape, draft: budget.DraftShape) -> bool:
    attn_tp = tp // dp
    heads = (target.q_heads, draft.q_heads, target.fused_tp or target.q_heads)
    return tp % dp == 0 and not any(count % attn_tp for count in heads)


def make_plan(wanted: Wanted, target: budget.TargetShape, draft: budget.DraftShape) -> Plan:
    """What SGLang 0.5.23 would allocate.

    Raises:
        DoesNotFit: weights, pools or the other tables do not fit; the message says which and what helps.
    """
    how = budget.Deployment(
        attn_tp=wanted.tp // wanted.dp,
        attn_dp=wanted.dp,
        page_size=wanted.page_size,
        swa_ratio=wanted.swa_ratio,
        requests=max(1, wanted.max_requests // wanted.dp),
        context_length=wanted.context_length or target.context_length,
        block_size=draft.block_size,
        kv_itemsize=budget.KV_ITEMSIZE[wanted.kv_dtype],
        draft_kv_itemsize=budget.KV_ITEMSIZE[wanted.kv_dtype],
        draft_window=wanted.draft_window,
    )
    static = int(wanted.gpu_memory * wanted.fraction)
    weights = wanted.weights or 0
    resident = weights + budget.embedding_copy_bytes(
        target.vocab_size, target.hidden_size, how.weight_itemsize, how.attn_tp, how.attn_dp
    )
    costs = budget.token_cost(target, draft, how)
    full, swa = budget.tokens_that_fit(static - resident, target, draft, how)
    if full == 0:
        raise DoesNotFit(
            f"--mem-fraction-static {wanted.fraction} of --gpu-memory {budget.human(wanted.gpu_memory)} is "
            f"{budget.human(static)}; weights {budget.human(weights)} and full embedding copy "
            f"{budget.human(resident - weights)} leave no room for KV pools. Raise --mem-fraction-static above "
            f"{min(resident / wanted.gpu_memory, 1):.3f}, or use more GPUs"
        )
    if swa and swa <= target.window + wanted.page_size:
        raise DoesNotFit(
            f"SWA pool of {swa} tokens: must be above the window {target.window} + page {wanted.page_size}; raise "
            f"--swa-full-tokens-ratio (now {wanted.swa_ratio}, at most 1) or --mem-fraction-static (now "
            f"{wanted.fraction}); {budget.largest(costs)}"
        )
    how = replace(how, requests=max(1, min(how.requests, full // 2)))
    parts = budget.parts(target, draft, how, full, swa)
    if wanted.weights is not None:
        parts.insert(0, budget.Part("weights", weights, source=STATIC, flags=budget.FLAGS["weights"]))
    rest = {p.name: p.predicted for p in parts if p.source == REST}
    room = wanted.gpu_memory - static
    if sum(rest.values()) > room:
        raise DoesNotFit(
            f"--mem-fraction-static {wanted.fraction} leaves {budget.human(room)} outside the pools, the tables there "
            f"need {budget.human(sum(rest.values()))}: lower it; {budget.largest(rest)}"
        )
    return Plan(parts, full, swa, how.requests, _flags(wanted, how), _notes(wanted, how, full, costs))


def _flags(wanted: Wanted, how: budget.Deployment) -> list[str]:
    flags = ["--tp", str(wanted.tp)]
    if wanted.dp > 1:
        flags += ["--dp", str(wanted.dp), "--enable-dp-attention", "--enable-dp-lm-head"]
    flags += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "DRAFT"]
    if wanted.draft_window is not None:
        flags += ["--speculative-draft-window-size", str(wanted.draft_window)]
    for name, value in (
        ("--speculative-num-draft-tokens", how.block_size),
        ("--mem-fraction-static", wanted.fraction),
        ("--swa-full-tokens-ratio", wanted.swa_ratio),
        ("--max-running-requests", wanted.max_requests),
        ("--context-length", how.context_length),
        ("--page-size", wanted.page_size),
        ("--kv-cache-dtype", _KV_FLAG[wanted.kv_dtype]),
    ):
        flags += [name, str(value)]
    return flags


def _notes(wanted: Wanted, how: budget.Deployment, full: int, costs: Mapping[str, float]) -> list[str]:
    notes = [f"one token of the full pool takes {budget.human(sum(costs.values()))}; {budget.largest(costs)}"]
    if wanted.weights is None:
        notes.append("weights are not counted: give --weights-gb, or these token counts are far too high")
    if full < how.context_length:
        notes.append(f"one request of the whole --context-length {how.context_length} does not fit in {full} tokens")
    if how.requests < wanted.max_requests // wanted.dp:
        notes.append(
            f"SGLang would reduce --max-running-requests to {how.requests} per group, half the full pool's tokens"
        )
    notes.append("not counted: the driver and RCCL (static), activations and graphs (rest)")
    return notes


def _show(made: Plan, wanted: Wanted, out: Console) -> None:
    title = f"per GPU, TP{wanted.tp} / DP{wanted.dp}, {budget.human(wanted.gpu_memory)}, KV in {wanted.kv_dtype}"
    table = Table(title=title, title_justify="left")
    for name in ("part", "bytes", "", "memory", "smaller with"):
        table.add_column(name, justify="right" if name in ("bytes", "") else "left")
    for part in made.parts:
        table.add_row(part.name, str(part.predicted), budget.human(part.predicted), part.source, part.flags)
    out.print(table)
    for source, name in ((STATIC, "weights and pools"), (REST, "tables outside the pools")):
        total = sum(part.predicted for part in made.parts if part.source == source)
        room = wanted.gpu_memory * (wanted.fraction if source == STATIC else 1 - wanted.fraction)
        out.print(f"{source}: {name} take {budget.human(total)} of {budget.human(room)}")
    out.print(
        f"tokens per attention group: full pool {made.full_tokens}, SWA pool {made.swa_tokens}; "
        f"{made.requests_per_group} requests"
    )
    for note in made.notes:
        out.print(f"note: {note}", markup=False, soft_wrap=True)
    out.print(shlex.join(made.flags), markup=False, soft_wrap=True)
