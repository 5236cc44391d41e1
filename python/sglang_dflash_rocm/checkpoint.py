"""Is a MiMo-V2 checkpoint, and its DFlash draft, complete and fit for a deployment? Reads JSON and file sizes only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_dflash_rocm.gate import server_flags

TARGETS = ("MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM")
DRAFT = "DFlashDraftModel"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
#: Any of these sets is a tokenizer.
_VOCABULARIES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))


def problems(model: Path, draft: Path | None = None, tp: int = 1, attention_groups: int = 1) -> list[str]:
    """Everything wrong with the files, each with its fix.

    Args:
        model: directory of the target.
        draft: directory of its DFlash draft.
        tp: SGLang's ``--tp``.
        attention_groups: DP attention groups inside it; the attention TP size is ``tp / attention_groups``.
    """
    found: list[str] = []
    target = _config(model, "the target", found)
    if target is not None:
        found += _target_problems(model, target, tp, attention_groups)
    if draft is not None:
        config = _config(draft, "the draft", found)
        if config is not None:
            found += _architecture(draft, config, (DRAFT,))
            found += _weight_problems(draft)
            found += _pair_problems(draft, config, target or {}, tp, attention_groups)
    return found


def deployment(argv: Sequence[str]) -> tuple[int, int]:
    """TP size and DP attention groups that server flags ask for.

    Raises:
        ValueError: one of the sizes is not a whole number above 0.
    """
    flags = server_flags(argv)
    tp = _size(flags, "--tp", "--tp-size", "--tensor-parallel-size")
    dp = _size(flags, "--dp", "--dp-size", "--data-parallel-size")
    groups = _size(flags, "--attn-dp-size", "--attention-data-parallel-size")
    return tp, dp if groups == 1 and "--enable-dp-attention" in flags else groups


def _size(flags: Mapping[str, str], *names: str) -> int:
    for name in names:
        value = flags.get(name, "1")
        if not value.isdecimal() or value == "0":
            raise ValueError(f"{name} {value}: must be a whole number above 0")
        if value != "1":
            return int(value)
    return 1


def _config(folder: Path, what: str, found: list[str]) -> dict | None:
    if not folder.is_dir():
        found.append(f"{folder}: no such directory; it should be {what}'s checkpoint")
        return None
    return _json(folder / "config.json", found)


def _json(path: Path, found: list[str]) -> dict | None:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        found.append(f"{path}: {error.strerror}; download the checkpoint again")
    except ValueError as error:
        found.append(f"{path}: not JSON ({error}); download the file again")
    else:
        if isinstance(content, dict):
            return content
        found.append(f"{path}: holds a {type(content).__name__}, should be a JSON object; download the file again")
    return None


def _target_problems(folder: Path, config: Mapping, tp: int, attention_groups: int) -> Iterator[str]:
    yield from _architecture(folder, config, TARGETS)
    yield from _attention_tp_problems(folder, config, tp, attention_groups)
    yield from _weight_problems(folder, fused_tp=_fused_tp(config))
    modules = {str(path).partition(".")[0].rpartition("--")[2] for path in (config.get("auto_map") or {}).values()}
    for module in sorted(modules):
        if not (folder / f"{module}.py").is_file():
            yield f"{folder / module}.py: missing, config.json's auto_map names it; download it"
    if not (folder / "tokenizer_config.json").is_file():
        yield f"{folder / 'tokenizer_config.json'}: missing; download the tokenizer's files"
    if not any(all((folder / name).is_file() for name in names) for names in _VOCABULARIES):
        choices = " or ".join(" with ".join(names) for names in _VOCABULARIES)
        yield f"{folder}: no tokenizer ({choices}); download the tokenizer's files"


def _architecture(folder: Path, config: Mapping, known: Sequence[str]) -> Iterator[str]:
    names = config.get("architectures")
    if not isinstance(names, list) or not set(names) & set(known):
        yield f"{folder / 'config.json'}: architectures={names!r}, should be {' or '.join(known)}; wrong directory?"


def _fused_tp(config: Mapping) -> int | None:
    """TP size that the fused QKV rows are interleaved for (SGLang's ``get_mimo_v2_fused_qkv_expected_tp_size``)."""
    if _of(config, "attention_projection_layout") != "fused_qkv":
        return None
    heads = _of(config, "num_key_value_heads")
    return heads if isinstance(heads, int) else None


def _of(config: Mapping, key: str) -> Any:
    value = config.get(key)
    return (config.get("text_config") or {}).get(key) if value is None else value


def _attention_tp_problems(folder: Path, config: Mapping, tp: int, groups: int) -> Iterator[str]:
    if tp % groups:
        yield f"--tp {tp} with {groups} attention groups: must divide; use another --tp or --dp"
        return
    fused, attention_tp = _fused_tp(config), tp // groups
    if fused and fused % attention_tp:
        yield (
            f"{folder / 'config.json'}: fused QKV is interleaved for TP {fused}, which attention TP {attention_tp} "
            f"(--tp {tp}, {groups} attention groups) does not divide; use --tp {tp} --dp {max(1, tp // fused)} "
            "--enable-dp-attention --enable-dp-lm-head, or a smaller --tp"
        )


def _weight_problems(folder: Path, fused_tp: int | None = None) -> Iterator[str]:
    """Shards that the index names, or the one file; LFS pointers and cut downloads are files that are too small."""
    if not (folder / _INDEX).is_file():
        if not (folder / _SINGLE).is_file():
            yield f"{folder}: neither {_INDEX} nor {_SINGLE}; download the weights"
        elif not (folder / _SINGLE).stat().st_size:
            yield f"{folder / _SINGLE}: is empty; download it again"
        return
    found: list[str] = []
    index = _json(folder / _INDEX, found)
    yield from found
    if index is None:
        return
    weights = index.get("weight_map")
    if not isinstance(weights, dict) or not weights:
        yield f"{folder / _INDEX}: has no weight_map; download the file again"
        return
    shards = sorted(set(map(str, weights.values())))
    sizes = {shard: path.stat().st_size if (path := folder / shard).is_file() else None for shard in shards}
    for state, broken in (
        ("missing", [shard for shard, size in sizes.items() if size is None]),
        ("empty", [shard for shard, size in sizes.items() if size == 0]),
    ):
        if broken:
            names = ", ".join(broken[:3]) + (f" and {len(broken) - 3} more" if len(broken) > 3 else "")
            yield f"{folder}: {len(broken)} of {len(shards)} shards {state}: {names}; download them"
    metadata = index.get("metadata") or {}
    total = metadata.get("total_size")
    here = sum(size or 0 for size in sizes.values())
    if all(sizes.values()) and isinstance(total, int) and here < total:
        yield (
            f"{folder}: the shards have {here} bytes, the index promises {total} of tensors: a download was cut, or "
            "they are Git LFS pointers; download them again"
        )
    saved_for = metadata.get("tp_size")
    if fused_tp and saved_for is not None and str(saved_for) != str(fused_tp):
        yield (
            f"{folder / _INDEX}: saved for TP {saved_for}, but config.json's num_key_value_heads makes SGLang read the "
            f"fused QKV as interleaved for {fused_tp}; take config.json and weights of one checkpoint"
        )


def _pair_problems(folder: Path, draft: Mapping, target: Mapping, tp: int, attention_groups: int) -> Iterator[str]:
    """What the draft takes from the target: hidden states of its layers, the embedding and the LM head."""
    for key, target_key in (
        ("hidden_size", "hidden_size"),
        ("target_hidden_size", "hidden_size"),
        ("vocab_size", "vocab_size"),
        ("num_target_layers", "num_hidden_layers"),
    ):
        ours, theirs = draft.get(key), _of(target, target_key)
        if ours is not None and theirs is not None and ours != theirs:
            yield f"{folder / 'config.json'}: {key}={ours}, the target's {target_key} is {theirs}; wrong draft?"
    layers = _of(target, "num_hidden_layers")
    chosen = (draft.get("dflash_config") or {}).get("target_layer_ids") or []
    if layers and (beyond := [layer for layer in chosen if layer >= layers]):
        yield f"{folder / 'config.json'}: target_layer_ids {beyond} of a target with {layers} layers; wrong draft?"
    heads, attention_tp = draft.get("num_attention_heads"), tp // attention_groups
    if heads and not tp % attention_groups and heads % attention_tp:
        yield (
            f"{folder / 'config.json'}: {heads} attention heads do not divide by attention TP {attention_tp}; "
            "use another --tp or --dp"
        )
