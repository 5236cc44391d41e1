"""Independent torch reference of DFlash: draft block, greedy verify, accepted counts. No line of SGLang takes part.

What it assumes, read off SGLang 0.5.23 (``srt/models/dflash.py``, ``srt/speculative/dflash_worker_v2.py``):

* The first answer token comes from the prefill. Every verify step then starts from ``n`` committed positions (prompt
  and answer so far without its last token) and that last token, the bonus token, which heads the block.
* The block is the bonus token and ``block_size - 1`` mask tokens at positions ``n .. n + block_size - 1``, embedded
  with the target's embedding. Row ``i >= 1`` of the draft's output, through the target's head, drafts ``n + i``.
* Keys and values of the context are projections of ``hidden_norm(fc(h))``, ``h`` being the target's residual streams
  after ``target_layer_ids``; they skip the draft's ``input_layernorm``. Those of the block are the block's own.
* Keys and queries are RMS-normalised per head, then rotated over the whole head; values are scaled by
  ``attention_value_scale``; sinks are per query head.
* Full layers see the whole block, sliding layers are causal, unless ``is_causal`` says otherwise for all layers.
  ``sliding_window`` counts the row's own key.
* ``--speculative-draft-window-size`` cuts the context to its last positions for the whole block, rounded down to a
  page boundary; positions stay absolute.
* A step commits the accepted drafts and the target's next token. The step that reaches the requested length counts
  all it accepted, also the tokens that are cut off (``srt/managers/.../batch_result_processor.py``).

As verify is greedy, the committed sequence is the target's own greedy one whatever the draft says. So the target runs
once, and a step's accepted count is the number of leading drafts that agree with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .reference import TinyReference, gated_mlp, load_checkpoint, rms_norm, rotate, softmax_attention


@dataclass(frozen=True)
class DraftRun:
    """One greedy answer by draft and verify.

    ``accepted`` has one entry per verify step, drafts only (0 .. ``block_size - 1``); ``min_gap`` is the smallest
    distance between best and second-best logit over the drafts that decided a count.
    """

    tokens: list[int]
    accepted: list[int]
    min_gap: float

    @property
    def verify_steps(self) -> int:
        return len(self.accepted)

    @property
    def accept_length(self) -> float:
        """Mean tokens per verify step, bonus included."""
        return 1 + sum(self.accepted) / len(self.accepted)


class DraftReference:
    """A DFlash draft with its target.

    Args:
        target: the reference target of the pair.
        config, weights: the draft's ``config.json`` and tensors, of the target's dtype.
        draft_window: ``--speculative-draft-window-size``, or ``None``.
        page_size: ``--page-size``; matters with ``draft_window`` only.
        block_size: ``--speculative-num-draft-tokens``; by default the draft's own.
    """

    def __init__(
        self,
        target: TinyReference,
        config: dict,
        weights: dict[str, torch.Tensor],
        *,
        draft_window: int | None = None,
        page_size: int = 1,
        block_size: int | None = None,
    ) -> None:
        self.target = target
        self.config = config
        self.weights = weights
        self.draft_window = draft_window
        self.page_size = page_size
        self.block_size = block_size or config["dflash_config"]["block_size"]

    @classmethod
    def from_checkpoint(
        cls,
        target: Path | str,
        draft: Path | str,
        *,
        window_keys: int | None = None,
        draft_window: int | None = None,
        page_size: int = 1,
        block_size: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> DraftReference:
        """Read both directories; ``window_keys`` is the target's, see :class:`TinyReference`."""
        config, weights = load_checkpoint(draft, dtype)
        reference = TinyReference.from_checkpoint(target, window_keys=window_keys, dtype=dtype)
        return cls(reference, config, weights, draft_window=draft_window, page_size=page_size, block_size=block_size)

    def accept_counts(self, prompt: Sequence[int], n: int) -> list[int]:
        """Accepted drafts of every verify step until the answer has ``n`` tokens."""
        return self.run(prompt, n).accepted

    @torch.inference_mode()
    def run(self, prompt: Sequence[int], n: int) -> DraftRun:
        """Tokens and accepted counts of a greedy answer of ``n`` tokens.

        Raises:
            ValueError: ``prompt`` is empty or ``n`` is below 1.
        """
        if not prompt or n < 1:
            raise ValueError(f"a prompt of {len(prompt)} tokens and an answer of {n} tokens")
        ids = list(prompt) + self.target.greedy(prompt, n + self.block_size)
        states = self.target.forward(ids).hidden_states
        features = torch.cat([states[layer] for layer in self.config["dflash_config"]["target_layer_ids"]], -1)
        context = features @ self.weights["fc.weight"].T
        context = rms_norm(context, self.weights["hidden_norm.weight"], self.config["rms_norm_eps"])

        accepted, gap, committed = [], float("inf"), len(prompt)
        while committed + 1 < len(prompt) + n:
            logits = self.draft_logits(ids[committed], context[:committed])
            drafts = logits.argmax(-1).tolist()
            truth = ids[committed + 1 : committed + self.block_size]
            count = next((i for i, (a, b) in enumerate(zip(drafts, truth, strict=True)) if a != b), len(truth))
            best = logits[: count + 1].topk(2, -1).values
            gap = min(gap, float((best[:, 0] - best[:, 1]).min()))
            accepted.append(count)
            committed += count + 1
        return DraftRun(ids[len(prompt) : len(prompt) + n], accepted, gap)

    def draft_logits(self, bonus: int, context: torch.Tensor) -> torch.Tensor:
        """Logits ``[block_size - 1, vocab]`` of the drafts after ``bonus``; ``context [n, hidden]`` is projected."""
        config, weights, eps = self.config, self.weights, self.config["rms_norm_eps"]
        embedding, head = (self.target.weights[f"{n}.weight"] for n in ("model.embed_tokens", "lm_head"))
        length = len(context)
        start = self._context_start(length)
        mask = config["dflash_config"]["mask_token_id"]
        x = embedding[[bonus] + [mask] * (self.block_size - 1)]
        for layer in range(config["num_hidden_layers"]):
            prefix = f"layers.{layer}."
            h = rms_norm(x, weights[prefix + "input_layernorm.weight"], eps)
            x = x + self._attention(layer, h, context[start:], start)
            h = rms_norm(x, weights[prefix + "post_attention_layernorm.weight"], eps)
            x = x + gated_mlp(h, weights, prefix + "mlp.")
        return rms_norm(x[1:], weights["norm.weight"], eps) @ head.T

    def _context_start(self, length: int) -> int:
        """First context position that the block sees."""
        if self.draft_window is None:
            return 0
        start = max(0, length - self.draft_window)
        return start - start % self.page_size

    def _attention(self, layer: int, h: torch.Tensor, context: torch.Tensor, start: int) -> torch.Tensor:
        config, dim = self.config, self.config["head_dim"]
        prefix = f"layers.{layer}.self_attn."
        positions = torch.arange(start, start + len(context) + len(h))
        own = positions[len(context) :]
        q, k, v = (
            (rows @ self.weights[f"{prefix}{name}_proj.weight"].T).view(len(rows), -1, dim)
            for name, rows in (("q", h), ("k", torch.cat([context, h])), ("v", torch.cat([context, h])))
        )
        q = rms_norm(q, self.weights[prefix + "q_norm.weight"], config["rms_norm_eps"])
        k = rms_norm(k, self.weights[prefix + "k_norm.weight"], config["rms_norm_eps"])
        q = rotate(q, own, config["rope_theta"], dim)
        k = rotate(k, positions, config["rope_theta"], dim)
        scale = config["dflash_config"].get("attention_value_scale")
        v = v if scale is None else v * scale
        sinks = self.weights[prefix + "attention_sink_bias"] if config["dflash_config"]["attention_sink_bias"] else None
        out = softmax_attention(q, k, v, self._visible(layer, own, positions), sinks)
        return out.flatten(1) @ self.weights[prefix + "o_proj.weight"].T

    def _visible(self, layer: int, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        sliding = self.config["layer_types"][layer] == "sliding_attention"
        causal = self.config.get("is_causal")
        distance = rows[:, None] - keys[None, :]
        visible = torch.ones_like(distance, dtype=torch.bool)
        if sliding if causal is None else causal:
            visible = visible & (distance >= 0)
        if sliding:
            visible = visible & (distance < self.config["sliding_window"])
        return visible
