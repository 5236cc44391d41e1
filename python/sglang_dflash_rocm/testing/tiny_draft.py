"""Weights of the tiny DFlash draft: each row of the block copies what the target would copy.

Row ``i`` of the block sits at position ``n + i`` and looks ``copy_period`` positions back: at the target's context
(draft KV) in the rows before ``copy_period``, at the bonus token (gathered embedding) in that row. A fault in either,
or in positions, windows and sinks, lowers the accept length.
"""

from __future__ import annotations

import torch

from .tiny_config import TinyConfig
from .tiny_target import BIAS, BIAS_DIM, COPY_SCORE, copy_directions, mirror, normal

#: Rotary pairs that tell distances apart; one pair alone repeats every 2 pi positions.
_COPY_PAIRS = 3


def draft_weights(config: TinyConfig) -> dict[str, torch.Tensor]:
    """Float32 tensors by checkpoint name, with the names of SGLang's ``DFlashDraftModel``."""
    hidden, q_heads, kv_heads = config.hidden_size, config.num_attention_heads, config.draft_num_key_value_heads
    head_dim, noise = config.draft_head_dim, config.draft_noise
    context = normal(config, "draft.fc", hidden, hidden * len(config.target_layer_ids)) * noise
    context[BIAS_DIM] = 0.0
    context[:, :hidden] += torch.eye(hidden)
    weights = {
        "fc.weight": context,
        "hidden_norm.weight": 1 + normal(config, "draft.hidden_norm", hidden, std=0.1),
        "norm.weight": 1 + normal(config, "draft.norm", hidden, std=0.1),
    }
    for layer in range(len(config.draft_layer_types)):
        prefix = f"layers.{layer}."
        attention = {
            "q_proj": normal(config, f"draft.{prefix}q_proj", q_heads * head_dim, hidden),
            "k_proj": normal(config, f"draft.{prefix}k_proj", kv_heads * head_dim, hidden),
            "v_proj": normal(config, f"draft.{prefix}v_proj", kv_heads * head_dim, hidden),
            "o_proj": normal(config, f"draft.{prefix}o_proj", hidden, q_heads * head_dim) * noise,
        }
        _make_copying(config, attention)
        attention["o_proj"][BIAS_DIM] = 0.0
        weights |= {f"{prefix}self_attn.{name}.weight": tensor for name, tensor in attention.items()}
        # Queries and keys are normalised, so the height of the scores comes from here.
        norm = torch.full((head_dim,), (COPY_SCORE * head_dim**-0.5) ** 0.5)
        weights |= {f"{prefix}self_attn.{name}_norm.weight": norm.clone() for name in "qk"}
        sinks = normal(config, f"draft.{prefix}sinks", q_heads, std=2.0)
        weights[prefix + "self_attn.attention_sink_bias"] = sinks + COPY_SCORE / 2
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = 1 + normal(config, f"draft.{prefix}{name}", hidden, std=0.1)
        for name, shape in (
            ("gate_proj", (config.intermediate_size, hidden)),
            ("up_proj", (config.intermediate_size, hidden)),
            ("down_proj", (hidden, config.intermediate_size)),
        ):
            weights[f"{prefix}mlp.{name}.weight"] = normal(config, f"draft.{prefix}{name}", *shape)
        down = weights[prefix + "mlp.down_proj.weight"]
        down *= noise
        down[BIAS_DIM] = 0.0
    return {name: tensor.contiguous() for name, tensor in weights.items()}


def _make_copying(config: TinyConfig, attention: dict[str, torch.Tensor]) -> None:
    """Turn the first query head of each KV group into one that copies its share of an embedding."""
    hidden, kv_heads, head_dim = config.hidden_size, config.draft_num_key_value_heads, config.draft_head_dim
    group, share = config.num_attention_heads // kv_heads, hidden // kv_heads
    q, k, v = (attention[n].view(-1, head_dim, hidden) for n in ("q_proj", "k_proj", "v_proj"))
    o = attention["o_proj"].view(hidden, -1, head_dim)
    query, key = copy_directions(head_dim, head_dim, config.copy_period, _COPY_PAIRS, config.draft_rope_theta)
    gain = config.copy_gain / config.attention_value_scale / len(config.draft_layer_types)
    for head in range(kv_heads):
        copier, dims = head * group, slice(head * share, (head + 1) * share)
        q[copier] = 0.0
        q[copier, :, BIAS_DIM] = query
        # The content of a token moves its key a little; that is where the draft's own mistakes come from.
        k[head] *= config.draft_noise / BIAS
        k[head, :, BIAS_DIM] = key
        v[head, :share] = 0.0
        v[head, :share, dims] = torch.eye(share)
        o[:, copier] = 0.0
        o[mirror(hidden)[dims], copier, :share] = torch.eye(share) * gain
