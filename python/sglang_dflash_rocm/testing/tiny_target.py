"""Weights of the tiny MiMo-V2 target: a random hybrid-SWA MoE model in which one layer copies.

A purely random target emits tokens that no draft can guess. Here the first SWA layer copies the embedding seen
``copy_period`` positions before the predicted one, into dims of its own (:func:`mirror`), and the head reads two votes:
the successor of the copied token, and a successor of the current one. The random rest of the model (attention, sinks,
experts) tips the scale. Answers thus follow a rhythm, break it now and then, and never run into a short cycle, since
successors are a permutation of the vocabulary. How the layer copies: embedding coordinate :data:`BIAS_DIM` is one
constant for all tokens, so that keys and queries made of it alone differ by their rotary angle only, and the softmax
peaks at one distance.
"""

from __future__ import annotations

import math
import zlib

import torch

from .tiny_config import TinyConfig

#: The embedding coordinate that is :data:`BIAS` for every token. No layer writes to it.
BIAS_DIM = 0
BIAS = 4.0
#: Nominal score of a copying head at its distance; over all distances the mean is about 0.
COPY_SCORE = 14.0
_COPY_PAIRS = 2


def normal(config: TinyConfig, name: str, *shape: int, std: float | None = None) -> torch.Tensor:
    """Gaussian weights that depend on the seed and the tensor's name only, not on the order of creation.

    Without ``std`` the last dimension is the fan-in: ``std = shape[-1] ** -0.5``.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{config.seed}/{name}".encode()))
    return torch.randn(*shape, generator=generator) * (shape[-1] ** -0.5 if std is None else std)


def target_weights(config: TinyConfig) -> dict[str, torch.Tensor]:
    """Float32 tensors by checkpoint name, projections in the layout that ``config.fused_qkv`` asks for."""
    hidden = config.hidden_size
    embedding = normal(config, "embed_tokens", config.vocab_size, hidden, std=1.0)
    embedding[config.mask_token_id] = 0.0
    embedding[:, BIAS_DIM] = 0.0
    head = torch.zeros_like(embedding)
    head[permutation(config, "repeat")] = embedding[:, mirror(hidden)]
    head[permutation(config, "surprise")] += config.surprise * embedding
    head[config.mask_token_id] = 0.0
    embedding[:, BIAS_DIM] = BIAS
    weights = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head / hidden**0.5,
        "model.norm.weight": 1 + normal(config, "norm", hidden, std=0.1),
    }
    copying = config.hybrid_layer_pattern.index(1)
    for layer, swa in enumerate(config.hybrid_layer_pattern):
        prefix = f"model.layers.{layer}."
        attention = _attention(config, prefix, bool(swa))
        if layer == copying:
            _make_copying(config, attention)
        attention["o_proj"][BIAS_DIM] = 0.0
        if config.fused_qkv:
            shards = config.num_key_value_heads
            attention = {"qkv_proj": interleave_qkv(*(attention.pop(f"{n}_proj") for n in "qkv"), shards)} | attention
        weights |= {f"{prefix}self_attn.{name}.weight": tensor for name, tensor in attention.items()}
        if swa:
            sinks = 1 + normal(config, prefix + "sinks", config.num_attention_heads, std=1.0)
            weights[prefix + "self_attn.attention_sink_bias"] = sinks
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{norm}.weight"] = 1 + normal(config, prefix + norm, hidden, std=0.1)
        weights |= _feed_forward(config, prefix + "mlp.", sparse=layer > 0)
    return {name: tensor.contiguous() for name, tensor in weights.items()}


def mirror(hidden: int) -> torch.Tensor:
    """The dim that each embedding dim is copied to, int64 ``[hidden]``; the constant one stays."""
    dims = torch.arange(hidden)
    dims[1:] = dims[1:].flip(0)
    return dims


def permutation(config: TinyConfig, name: str) -> torch.Tensor:
    """A successor for every token, int64 ``[vocab]``."""
    return normal(config, name, config.vocab_size, std=1.0).argsort(stable=True)


def interleave_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shards: int) -> torch.Tensor:
    """Rows of the fused ``qkv_proj``: ``[q_0; k_0; v_0; q_1; k_1; v_1; ...]`` for ``shards`` tensor-parallel ranks.

    SGLang gives shard ``r`` to attention-TP rank ``r`` (``srt/models/mimo_v2.py``, ``load_mimo_v2_qkv_proj_weight``).
    """
    ranks = zip(q.chunk(shards), k.chunk(shards), v.chunk(shards), strict=True)
    return torch.cat([rows for rank in ranks for rows in rank])


def split_qkv(qkv: torch.Tensor, sizes: tuple[int, int, int], shards: int) -> tuple[torch.Tensor, ...]:
    """Inverse of :func:`interleave_qkv`; ``sizes`` are the rows of q, k and v over all shards."""
    per_shard = [size // shards for size in sizes]
    parts = [shard.split(per_shard) for shard in qkv.chunk(shards)]
    return tuple(torch.cat(rows) for rows in zip(*parts, strict=True))


def copy_directions(
    head_dim: int, rotary_dim: int, distance: int, pairs: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit query and key vectors ``[head_dim]`` whose rotated product peaks when the key is ``distance`` behind.

    The first ``pairs`` rotary pairs (neox: dims ``f`` and ``f + rotary_dim / 2``, angle ``theta ** (-2f/rotary_dim)``
    per position) are used; the product is the mean of ``cos(angle_f * (distance_seen - distance))`` over them.
    """
    query, key = torch.zeros(head_dim), torch.zeros(head_dim)
    half = rotary_dim // 2
    for pair in range(pairs):
        angle = distance * theta ** (-pair / half)
        key[pair] = pairs**-0.5
        query[pair] = math.cos(angle) * pairs**-0.5
        query[pair + half] = -math.sin(angle) * pairs**-0.5
    return query, key


def _attention(config: TinyConfig, prefix: str, swa: bool) -> dict[str, torch.Tensor]:
    hidden, q_heads = config.hidden_size, config.num_attention_heads
    kv_heads = config.swa_num_key_value_heads if swa else config.num_key_value_heads
    out_width = q_heads * config.v_head_dim
    return {
        "q_proj": normal(config, prefix + "q_proj", q_heads * config.head_dim, hidden),
        "k_proj": normal(config, prefix + "k_proj", kv_heads * config.head_dim, hidden),
        "v_proj": normal(config, prefix + "v_proj", kv_heads * config.v_head_dim, hidden),
        "o_proj": normal(config, prefix + "o_proj", hidden, out_width) * config.attention_noise,
    }


def _make_copying(config: TinyConfig, attention: dict[str, torch.Tensor]) -> None:
    """Turn the first query head of each KV group into one that copies its share of the hidden state."""
    kv_heads, hidden = config.swa_num_key_value_heads, config.hidden_size
    group, share = config.num_attention_heads // kv_heads, hidden // kv_heads
    q, k = (attention[n].view(-1, config.head_dim, hidden) for n in ("q_proj", "k_proj"))
    v = attention["v_proj"].view(kv_heads, config.v_head_dim, hidden)
    o = attention["o_proj"].view(hidden, -1, config.v_head_dim)
    # Predicting position p + 1 from p: the key lies one position nearer than the period says.
    query, key = copy_directions(
        config.head_dim, config.rotary_dim, config.copy_period - 1, _COPY_PAIRS, config.swa_rope_theta
    )
    half = config.rotary_dim // 2
    for head in range(kv_heads):
        copier, dims = head * group, slice(head * share, (head + 1) * share)
        q[copier] = 0.0
        q[copier, :, BIAS_DIM] = query * COPY_SCORE * config.head_dim**0.5 / BIAS
        k[head, key.bool() | key.roll(half).bool()] = 0.0
        k[head, :, BIAS_DIM] = key / BIAS
        v[head, :share] = 0.0
        v[head, :share, dims] = torch.eye(share)
        o[:, copier] = 0.0
        o[mirror(hidden)[dims], copier, :share] = torch.eye(share) * config.copy_gain / config.attention_value_scale


def _feed_forward(config: TinyConfig, prefix: str, sparse: bool) -> dict[str, torch.Tensor]:
    if not sparse:
        return _gated_mlp(config, prefix, config.intermediate_size)
    experts, hidden = config.n_routed_experts, config.hidden_size
    weights = {
        prefix + "gate.weight": normal(config, prefix + "gate", experts, hidden),
        prefix + "gate.e_score_correction_bias": normal(config, prefix + "bias", experts, std=0.1),
    }
    for expert in range(experts):
        weights |= _gated_mlp(config, f"{prefix}experts.{expert}.", config.moe_intermediate_size)
    return weights


def _gated_mlp(config: TinyConfig, prefix: str, width: int) -> dict[str, torch.Tensor]:
    hidden = config.hidden_size
    weights = {
        prefix + "gate_proj.weight": normal(config, prefix + "gate_proj", width, hidden),
        prefix + "up_proj.weight": normal(config, prefix + "up_proj", width, hidden),
        prefix + "down_proj.weight": normal(config, prefix + "down_proj", hidden, width) * config.mlp_noise,
    }
    weights[prefix + "down_proj.weight"][BIAS_DIM] = 0.0
    return weights
