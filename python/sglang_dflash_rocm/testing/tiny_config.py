"""Geometry and constants of the tiny MiMo-V2 target and its DFlash draft, and the ``config.json`` of both."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

#: Raised whenever the same configuration gives other weights or files, so that old directories are rebuilt.
GENERATOR_VERSION = 2

#: ``config.json`` key of the fused layout; the number of interleaved shards is ``num_key_value_heads``
#: (SGLang ``srt/configs/model_config.py``, ``get_mimo_v2_fused_qkv_expected_tp_size``).
FUSED_LAYOUT = "fused_qkv"


@dataclass(frozen=True)
class TinyConfig:
    """One pair of models. Everything about the files follows from these fields.

    Attention heads divide by 1, 2 and 4; sliding-window (SWA) layers have twice the KV heads of full layers, as in
    MiMo-V2-Flash. ``block_size`` counts the bonus token, as DFlash does.
    """

    variant: str = "base"
    seed: int = 5
    vocab_size: int = 512
    hidden_size: int = 64
    intermediate_size: int = 96
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 48
    v_head_dim: int = 32
    #: 0 is a full layer, 1 an SWA layer.
    hybrid_layer_pattern: tuple[int, ...] = (0, 1, 1, 0)
    #: Keys that a query of an SWA layer sees, its own included.
    sliding_window: int = 8
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 32
    attention_value_scale: float = 0.707
    partial_rotary_factor: float = 0.334
    rope_theta: float = 5_000_000.0
    swa_rope_theta: float = 10_000.0
    max_position_embeddings: int = 2048
    fused_qkv: bool = False

    block_size: int = 8
    target_layer_ids: tuple[int, ...] = (0, 2)
    draft_head_dim: int = 32
    draft_num_key_value_heads: int = 4
    draft_layer_types: tuple[str, ...] = ("sliding_attention", "full_attention")
    draft_rope_theta: float = 10_000.0
    #: Keys that a row of a sliding draft layer sees, its own included.
    draft_sliding_window: int = 16
    #: ``None`` leaves it to the layer type: sliding layers causal, full layers not.
    draft_is_causal: bool | None = None

    #: The target likes to continue the token this many positions before the one it predicts.
    copy_period: int = 7
    #: Weight of that vote in the residual stream, relative to the current token's embedding.
    copy_gain: float = 2.5
    #: Weight of the current token's vote for another successor, which the draft does not know.
    surprise: float = 0.8
    #: Weights of the random attention and MLP outputs, which decide between the two votes.
    attention_noise: float = 1.2
    mlp_noise: float = 0.3
    #: Weight of the random part of the draft.
    draft_noise: float = 0.5

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.swa_num_key_value_heads:
            raise ValueError(f"{self.num_attention_heads} q heads over {self.swa_num_key_value_heads} SWA KV heads")
        if not 1 <= self.copy_period <= self.sliding_window:
            raise ValueError(f"copy_period {self.copy_period} must lie within sliding_window {self.sliding_window}")
        if 1 not in self.hybrid_layer_pattern:
            raise ValueError("hybrid_layer_pattern needs an SWA layer: it does the copying")
        for heads, width in ((self.swa_num_key_value_heads, self.v_head_dim), self._draft_heads):
            if self.hidden_size % heads or self.hidden_size // heads > width:
                raise ValueError(f"{heads} KV heads of width {width} cannot carry a hidden state of {self.hidden_size}")

    @property
    def swa_num_key_value_heads(self) -> int:
        return 2 * self.num_key_value_heads

    @property
    def mask_token_id(self) -> int:
        """The last id; the target never has it in a prompt."""
        return self.vocab_size - 1

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.hybrid_layer_pattern)

    @property
    def _draft_heads(self) -> tuple[int, int]:
        return self.draft_num_key_value_heads, self.draft_head_dim

    def fingerprint(self) -> str:
        """Hex digest of every field and of the generator's version."""
        text = json.dumps({"generator": GENERATOR_VERSION, **dataclasses.asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def target_json(self) -> dict:
        """``config.json`` of the target, with the field names of XiaomiMiMo/MiMo-V2-Flash."""
        config = {
            "architectures": ["MiMoV2ForCausalLM"],
            "model_type": "mimo_v2",
            "auto_map": {"AutoConfig": "configuration_mimo_v2.MiMoV2Config"},
            "dtype": "float32",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "v_head_dim": self.v_head_dim,
            "swa_num_attention_heads": self.num_attention_heads,
            "swa_num_key_value_heads": self.swa_num_key_value_heads,
            "swa_head_dim": self.head_dim,
            "swa_v_head_dim": self.v_head_dim,
            "hybrid_layer_pattern": list(self.hybrid_layer_pattern),
            "sliding_window": self.sliding_window,
            "sliding_window_size": self.sliding_window,
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "attention_value_scale": self.attention_value_scale,
            "attention_bias": False,
            "partial_rotary_factor": self.partial_rotary_factor,
            "rope_theta": self.rope_theta,
            "swa_rope_theta": self.swa_rope_theta,
            "moe_layer_freq": [0] + [1] * (self.num_hidden_layers - 1),
            "n_routed_experts": self.n_routed_experts,
            "n_shared_experts": None,
            "num_experts_per_tok": self.num_experts_per_tok,
            "moe_intermediate_size": self.moe_intermediate_size,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": None,
            "hidden_act": "silu",
            "layernorm_epsilon": 1e-5,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        if self.fused_qkv:
            config["attention_projection_layout"] = FUSED_LAYOUT
        return config

    def draft_json(self) -> dict:
        """``config.json`` of the draft, read by SGLang's ``parse_dflash_draft_config``."""
        config = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "dtype": "float32",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": len(self.draft_layer_types),
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.draft_num_key_value_heads,
            "head_dim": self.draft_head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.draft_rope_theta,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "layer_types": list(self.draft_layer_types),
            "sliding_window": self.draft_sliding_window,
            "use_sliding_window": True,
            "max_window_layers": 0,
            "block_size": self.block_size,
            "num_target_layers": self.num_hidden_layers,
            "bos_token_id": None,
            "eos_token_id": None,
            "dflash_config": {
                "target_layer_ids": list(self.target_layer_ids),
                "mask_token_id": self.mask_token_id,
                "block_size": self.block_size,
                "attention_sink_bias": True,
                "attention_value_scale": self.attention_value_scale,
            },
        }
        if self.draft_is_causal is not None:
            config["is_causal"] = self.draft_is_causal
        return config


#: The variants by name. ``wide`` has the head sizes of MiMo-V2.6-Flash and its draft. Seeds and noise are chosen so
#: that greedy answers to ``tiny_prompts`` leave comfortable gaps between best and second-best logit, with mean accept
#: lengths of 2.5 to 4.5; ``test/unit/test_references.py`` holds them to it.
VARIANTS: dict[str, TinyConfig] = {
    "base": TinyConfig(),
    "fused": TinyConfig(variant="fused", fused_qkv=True),
    "wide": TinyConfig(
        variant="wide",
        seed=2,
        head_dim=192,
        v_head_dim=128,
        draft_head_dim=128,
        surprise=0.85,
        attention_noise=1.4,
    ),
}


def tiny_config(variant: str = "base", **overrides: object) -> TinyConfig:
    """The configuration of ``variant`` with fields replaced.

    Raises:
        ValueError: no such variant, no such field, or fields that do not fit together.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} is not one of {', '.join(VARIANTS)}")
    known = {field.name for field in dataclasses.fields(TinyConfig)} - {"variant"}
    if unknown := sorted(overrides.keys() - known):
        raise ValueError(f"unknown field {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return dataclasses.replace(VARIANTS[variant], **overrides)
