"""Independent torch reference of the MiMo-V2 target: full recomputation, no cache, no SGLang.

Follows the model as XiaomiMiMo/MiMo-V2-Flash publishes it (transformers: ``mimo_v2_flash``): RMSNorm before attention
and MLP, partial neox rotary embedding, values scaled by ``attention_value_scale``, per-head sinks and a sliding window
on SWA layers, sigmoid router whose bias takes part in the choice only, weights of the chosen experts renormalised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F

from .tiny_config import FUSED_LAYOUT
from .tiny_target import split_qkv


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x [..., n]`` divided by its root mean square, times ``weight [n]``."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float, rotary_dim: int) -> torch.Tensor:
    """Neox rotary embedding of the first ``rotary_dim`` dims of ``x [T, heads, dim]`` at ``positions [T]``."""
    frequency = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = positions.to(torch.float64)[:, None, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :rotary_dim].chunk(2, -1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([*turned, x[..., rotary_dim:]], -1)


def softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Grouped-query attention with the scale ``dim ** -0.5``.

    Args:
        q: ``[Q, q_heads, dim]``. k: ``[K, kv_heads, dim]``. v: ``[K, kv_heads, v_dim]``.
        visible: bool ``[Q, K]``; every row has at least one ``True``.
        sinks: ``[q_heads]`` logits that take part in the softmax and have no value, or ``None``.

    Returns:
        ``[Q, q_heads, v_dim]``.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], -1)
    probabilities = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", probabilities, v)


def gated_mlp(x: torch.Tensor, weights: Mapping[str, torch.Tensor], prefix: str) -> torch.Tensor:
    """``down(silu(gate(x)) * up(x))`` with the projections named ``prefix + "gate_proj.weight"`` and so on."""
    gate, up, down = (weights[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def load_checkpoint(directory: Path | str, dtype: torch.dtype) -> tuple[dict, dict[str, torch.Tensor]]:
    """``config.json`` and every tensor of the directory's safetensors files, cast to ``dtype``."""
    from safetensors.torch import load_file

    directory = Path(directory)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {directory}")
    weights = {name: tensor.to(dtype) for file in files for name, tensor in load_file(file).items()}
    return json.loads((directory / "config.json").read_text()), weights


@dataclass(frozen=True)
class TargetOutput:
    """``logits [T, vocab]`` and, per layer, the residual stream after it, ``[T, hidden]``."""

    logits: torch.Tensor
    hidden_states: list[torch.Tensor]


class TinyReference:
    """The target in plain torch.

    Args:
        config: the checkpoint's ``config.json``.
        weights: tensors by checkpoint name with split projections, all of one dtype.
        window_keys: keys a query of an SWA layer sees, its own included; ``None`` takes the config's
            ``sliding_window``. SGLang 0.5.23 lets extend and verify see ``sliding_window + 1``.
    """

    def __init__(self, config: dict, weights: dict[str, torch.Tensor], window_keys: int | None = None) -> None:
        self.config = config
        self.weights = weights
        self.window_keys = config["sliding_window"] if window_keys is None else window_keys

    @classmethod
    def from_checkpoint(
        cls, directory: Path | str, *, window_keys: int | None = None, dtype: torch.dtype = torch.float32
    ) -> TinyReference:
        """Read a target directory in any layout; fused projections are taken apart."""
        config, weights = load_checkpoint(directory, dtype)
        if config.get("attention_projection_layout") == FUSED_LAYOUT:
            weights = split_fused(config, weights)
        return cls(config, weights, window_keys)

    @torch.inference_mode()
    def forward(self, ids: Sequence[int]) -> TargetOutput:
        """Logits and hidden states of one sequence, every position from scratch."""
        config, weights = self.config, self.weights
        x = weights["model.embed_tokens.weight"][torch.tensor(list(ids), dtype=torch.int64)]
        states = []
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            eps = config["layernorm_epsilon"]
            x = x + self._attention(layer, rms_norm(x, weights[prefix + "input_layernorm.weight"], eps))
            h = rms_norm(x, weights[prefix + "post_attention_layernorm.weight"], eps)
            sparse = config["moe_layer_freq"][layer]
            x = x + (self._experts(h, prefix + "mlp.") if sparse else gated_mlp(h, weights, prefix + "mlp."))
            states.append(x)
        final = rms_norm(x, weights["model.norm.weight"], config["layernorm_epsilon"])
        return TargetOutput(final @ weights["lm_head.weight"].T, states)

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """``[T, vocab]``: row ``t`` predicts the token at ``t + 1``."""
        return self.forward(ids).logits

    def greedy(self, prompt: Sequence[int], n: int) -> list[int]:
        """The ``n`` tokens of greedy decoding after ``prompt``; the lowest id wins a tie."""
        ids = list(prompt)
        for _ in range(n):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]

    def min_gap(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """Smallest distance between the best and the second-best logit over the steps of ``answer``."""
        best = self.logits([*prompt, *answer])[len(prompt) - 1 : -1].topk(2, -1).values
        return float((best[:, 0] - best[:, 1]).min())

    def _attention(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        config, positions = self.config, torch.arange(len(h))
        prefix = f"model.layers.{layer}.self_attn."
        swa = config["hybrid_layer_pattern"][layer] == 1
        dim, v_dim = config["head_dim"], config["v_head_dim"]
        q, k, v = (h @ self.weights[f"{prefix}{name}_proj.weight"].T for name in "qkv")
        theta = config["swa_rope_theta"] if swa else config["rope_theta"]
        rotary_dim = int(dim * config["partial_rotary_factor"])
        q, k = (rotate(x.view(len(h), -1, dim), positions, theta, rotary_dim) for x in (q, k))
        v = v.view(len(h), -1, v_dim) * config["attention_value_scale"]
        distance = positions[:, None] - positions[None, :]
        visible = distance >= 0
        if swa:
            visible = visible & (distance < self.window_keys)
        out = softmax_attention(q, k, v, visible, self.weights.get(prefix + "attention_sink_bias"))
        return out.flatten(1) @ self.weights[prefix + "o_proj.weight"].T

    def _experts(self, h: torch.Tensor, prefix: str) -> torch.Tensor:
        scores = (h @ self.weights[prefix + "gate.weight"].T).sigmoid()
        bias = self.weights[prefix + "gate.e_score_correction_bias"]
        chosen = (scores + bias).topk(self.config["num_experts_per_tok"], -1).indices
        share = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        share = share / share.sum(-1, keepdim=True)
        gate, up, down = (self._stacked[prefix + name] for name in ("gate", "up", "down"))
        inner = F.silu(torch.einsum("th,eih->tei", h, gate)) * torch.einsum("th,eih->tei", h, up)
        return torch.einsum("tei,ehi,te->th", inner, down, share)

    @cached_property
    def _stacked(self) -> dict[str, torch.Tensor]:
        """Expert projections of a layer as one tensor ``[experts, out, in]``."""
        stacked = {}
        for layer, sparse in enumerate(self.config["moe_layer_freq"]):
            prefix = f"model.layers.{layer}.mlp."
            for name in ("gate", "up", "down") if sparse else ():
                parts = [
                    self.weights[f"{prefix}experts.{e}.{name}_proj.weight"]
                    for e in range(self.config["n_routed_experts"])
                ]
                stacked[prefix + name] = torch.stack(parts)
        return stacked


def split_fused(config: dict, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights with each interleaved ``qkv_proj`` taken apart into ``q_proj``, ``k_proj`` and ``v_proj``."""
    out = dict(weights)
    for layer, swa in enumerate(config["hybrid_layer_pattern"]):
        prefix = f"model.layers.{layer}.self_attn."
        kv_heads = config["swa_num_key_value_heads" if swa else "num_key_value_heads"]
        dim, v_dim = config["head_dim"], config["v_head_dim"]
        sizes = (config["num_attention_heads"] * dim, kv_heads * dim, kv_heads * v_dim)
        parts = split_qkv(out.pop(prefix + "qkv_proj.weight"), sizes, config["num_key_value_heads"])
        out |= {f"{prefix}{name}_proj.weight": part for name, part in zip("qkv", parts, strict=True)}
    return out
