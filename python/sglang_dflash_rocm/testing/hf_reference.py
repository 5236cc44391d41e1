"""A second reference that no one here wrote: ``MiMoV2FlashForCausalLM`` of transformers (5.19 or later)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from .reference import load_checkpoint, split_fused
from .tiny_config import FUSED_LAYOUT


class WeightMismatch(RuntimeError):
    """The checkpoint and transformers' model do not have the same tensors."""


class HFReference:
    """transformers' model with the weights of a tiny target, float32, eager attention, no KV cache."""

    def __init__(self, config: dict, weights: dict[str, torch.Tensor]) -> None:
        from transformers import MiMoV2FlashForCausalLM

        if config.get("attention_projection_layout") == FUSED_LAYOUT:
            weights = split_fused(config, weights)
        self.model = MiMoV2FlashForCausalLM(_hf_config(config)).float().eval()
        result = self.model.load_state_dict(_hf_names(config, weights), strict=False)
        if result.missing_keys or result.unexpected_keys:
            missing, unexpected = sorted(result.missing_keys), sorted(result.unexpected_keys)
            raise WeightMismatch(f"after mapping to transformers' names: missing {missing}, unexpected {unexpected}")

    @classmethod
    def from_checkpoint(cls, directory: Path | str) -> HFReference:
        """Read a target directory in any layout.

        Raises:
            WeightMismatch: a tensor of the model was not set, or one of the checkpoint has no place in it.
            ImportError: transformers is older than 5.19.
        """
        return cls(*load_checkpoint(directory, torch.float32))

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """``[T, vocab]``: row ``t`` predicts the token at ``t + 1``."""
        return self.model(torch.tensor([list(ids)]), use_cache=False).logits[0]

    def greedy(self, prompt: Sequence[int], n: int) -> list[int]:
        """The ``n`` tokens of greedy decoding after ``prompt``."""
        ids = list(prompt)
        for _ in range(n):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]


def _hf_config(config: dict):
    from transformers import MiMoV2FlashConfig

    same = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "v_head_dim sliding_window moe_intermediate_size n_routed_experts num_experts_per_tok n_group topk_group "
        "norm_topk_prob attention_value_scale rms_norm_eps max_position_embeddings tie_word_embeddings"
    )
    thetas = {"full_attention": config["rope_theta"], "sliding_attention": config["swa_rope_theta"]}
    factor = config["partial_rotary_factor"]
    return MiMoV2FlashConfig(
        **{name: config[name] for name in same.split()},
        layer_types=["sliding_attention" if swa else "full_attention" for swa in config["hybrid_layer_pattern"]],
        mlp_layer_types=["sparse" if sparse else "dense" for sparse in config["moe_layer_freq"]],
        rope_parameters={
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": factor}
            for kind, theta in thetas.items()
        },
        attn_implementation="eager",
    )


def _hf_names(config: dict, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors under transformers' names; experts stacked to ``[experts, out, in]``."""
    named = {name.replace("attention_sink_bias", "sinks"): tensor for name, tensor in weights.items()}
    for layer, sparse in enumerate(config["moe_layer_freq"]):
        if not sparse:
            continue
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([named.pop(f"{prefix}{e}.{n}_proj.weight") for e in range(config["n_routed_experts"])])
            for n in ("gate", "up", "down")
        )
        named[prefix + "gate_up_proj"] = torch.cat([gate, up], 1)
        named[prefix + "down_proj"] = down
    return named
