"""Build a tiny MiMo-V2 target and its DFlash draft: ``python -m sglang_dflash_rocm.testing.tiny_models OUT``.

The same arguments give the same bytes. Weights are float32, so that greedy tokens do not hang on the last bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .tiny_config import VARIANTS, TinyConfig, tiny_config
from .tiny_tokenizer import save_tokenizer

_STAMP = "tiny.json"

#: transformers has no ``mimo_v2``; the real checkpoint brings its own configuration class, and so do we.
_CONFIGURATION = '''"""Configuration of the tiny MiMo-V2 target; every field comes from config.json."""

from transformers import PretrainedConfig


class MiMoV2Config(PretrainedConfig):
    model_type = "mimo_v2"
'''


@dataclass(frozen=True)
class TinyModels:
    """What was built: ``target`` and ``draft`` are model directories under ``root``."""

    root: Path
    target: Path
    draft: Path
    config: TinyConfig


def build_tiny_models(out_dir: Path | str, variant: str = "base", **overrides: object) -> TinyModels:
    """Write the pair ``variant`` to ``out_dir/variant``, unless exactly this pair is already there.

    Args:
        out_dir: created if missing; several variants may share it.
        variant: a key of ``VARIANTS``.
        overrides: fields of :class:`TinyConfig`, for example ``sliding_window=16``.

    Raises:
        ValueError: no such variant or field, or fields that do not fit together.
        FileExistsError: the directory exists and was not built here.
    """
    config = tiny_config(variant, **overrides)
    root = Path(out_dir) / variant
    models = TinyModels(root, root / "target", root / "draft", config)
    if _stamp(root) == config.fingerprint():
        return models
    if root.exists() and _stamp(root) is None and any(root.iterdir()):
        raise FileExistsError(f"{root} exists and has no {_STAMP}: not built here, remove it or choose another place")
    root.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{variant}-", dir=root.parent))
    try:
        _write(work, config)
        _replace(work, root, config.fingerprint())
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return models


def tiny_prompts(n: int, seed: int = 7, lengths: tuple[int, int] = (3, 40)) -> list[list[int]]:
    """``n`` prompts of random ids, each ``lengths[0] .. lengths[1]`` long, the same for the same arguments.

    The ids leave out the chat template's words and the mask token. The first ``k`` prompts do not depend on ``n``.
    """
    rng = random.Random(seed)
    return [[rng.randrange(5, 500) for _ in range(rng.randint(*lengths))] for _ in range(n)]


def _write(directory: Path, config: TinyConfig) -> None:
    from safetensors.torch import save_file

    from .tiny_draft import draft_weights
    from .tiny_target import target_weights

    pairs = {
        "target": (config.target_json(), target_weights(config)),
        "draft": (config.draft_json(), draft_weights(config)),
    }
    for name, (fields, weights) in pairs.items():
        model = directory / name
        model.mkdir()
        (model / "config.json").write_text(json.dumps(fields, indent=1) + "\n")
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    (directory / "target" / "configuration_mimo_v2.py").write_text(_CONFIGURATION)
    save_tokenizer(directory / "target", config.vocab_size)
    (directory / _STAMP).write_text(json.dumps({"fingerprint": config.fingerprint()}) + "\n")


def _stamp(root: Path) -> str | None:
    try:
        return json.loads((root / _STAMP).read_text())["fingerprint"]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError):
        return None


def _replace(work: Path, root: Path, fingerprint: str) -> None:
    """Move a finished directory into place; a parallel build of the same pair may win."""
    work.chmod(0o755)
    old = work.with_name(work.name + ".old")
    with contextlib.suppress(FileNotFoundError):
        os.replace(root, old)
    try:
        os.replace(work, root)
    except OSError:
        if _stamp(root) != fingerprint:
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tiny_models", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="directory that gets one sub-directory per variant")
    parser.add_argument("--variant", choices=VARIANTS, default="base")
    args = parser.parse_args(argv)
    models = build_tiny_models(args.out, args.variant)
    for name in ("target", "draft"):
        directory = getattr(models, name)
        size = sum(file.stat().st_size for file in directory.iterdir())
        print(f"{name:6} {size / 1e6:6.1f} MB  {directory}")


if __name__ == "__main__":
    main()
