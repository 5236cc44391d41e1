"""A checkpoint directory with the real geometry of MiMo-V2.6-Flash and its draft; the weights are files of holes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sglang_dflash_rocm.testing.tiny_config import tiny_config

#: SGLang reads the configuration with the class that the checkpoint brings.
CONFIGURATION = """from transformers import PretrainedConfig


class MiMoV2Config(PretrainedConfig):
    model_type = "mimo_v2"
"""
#: 48 layers, 9 of them full.
PATTERN = [0 if layer == 0 or layer % 6 == 5 else 1 for layer in range(48)]
TARGET = {
    **tiny_config("fused").target_json(),
    "dtype": "bfloat16",
    "vocab_size": 152576,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": len(PATTERN),
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "hybrid_layer_pattern": PATTERN,
    "moe_layer_freq": [0] + [1] * 47,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "moe_router_dtype": "bfloat16",
    "max_position_embeddings": 262144,
    # Only that they are there: they make it a multimodal checkpoint.
    "vision_config": {"hidden_size": 1280},
    "audio_config": {"hidden_size": 1280},
    "quantization_config": {
        "quant_method": "fp8",
        "store_dtype": "mxfp4",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
DRAFT = {
    **tiny_config().draft_json(),
    "dtype": "bfloat16",
    "vocab_size": 152576,
    "hidden_size": 4096,
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention"] * 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": 1024,
    "num_target_layers": len(PATTERN),
    "dflash_config": {"target_layer_ids": [0, 11, 23, 35, 47], "mask_token_id": 151675, "block_size": 8},
}
SHARDS = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
SHARD_BYTES = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """Two directories, as a download leaves them."""

    target: Path
    draft: Path

    def edit(self, file: str, **changes: object) -> None:
        """Change keys of a JSON file below :attr:`target`; ``None`` removes one."""
        path = self.target / file
        content = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def write_checkpoint(root: Path) -> Checkpoint:
    """Below ``root``; the draft lies inside the target, where the launchers look for it."""
    target, draft = root / "MiMo-V2.6-Flash", root / "MiMo-V2.6-Flash" / "dflash"
    draft.mkdir(parents=True)
    index = {
        "metadata": {"total_size": SHARD_BYTES * len(SHARDS) - 1000, "tp_size": 4},
        "weight_map": {f"model.layers.{layer}.weight": SHARDS[layer % 3] for layer in range(48)},
    }
    for name, content in (
        ("config.json", TARGET),
        ("model.safetensors.index.json", index),
        ("tokenizer_config.json", {}),
        ("tokenizer.json", {}),
    ):
        (target / name).write_text(json.dumps(content))
    (target / "configuration_mimo_v2.py").write_text(CONFIGURATION)
    (draft / "config.json").write_text(json.dumps(DRAFT))
    for path in (*(target / shard for shard in SHARDS), draft / "model.safetensors"):
        with path.open("wb") as file:
            file.truncate(SHARD_BYTES)
    return Checkpoint(target, draft)
