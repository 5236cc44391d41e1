"""Requests to a running server, streamed, each with a timeout; answers as one record whatever the route."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import requests


@dataclass(frozen=True)
class Answer:
    """One finished request.

    ``accepted`` counts drafts that verify kept (the bonus token is not one of them), ``verify_steps`` the verify
    forwards; both are ``None`` without speculation. ``chunks`` is the number of streamed pieces.
    """

    tokens: list[int]
    dp_rank: int | None
    verify_steps: int | None
    accepted: int | None
    cached_tokens: int
    chunks: int
    finish: str
    logprobs: list[float] | None = None

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify step, bonus included."""
        return len(self.tokens) / self.verify_steps if self.verify_steps else None


def generate(
    url: str,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    timeout_s: float = 120,
    dp_rank: int | None = None,
    temperature: float = 0.0,
    logprobs: bool = False,
    rid: str | None = None,
) -> Answer:
    """``POST /generate`` with token ids, streamed.

    Raises:
        requests.RequestException: no connection, an HTTP error, or silence for longer than ``timeout_s``.
        RuntimeError: the stream carried an error or ended early.
    """
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": temperature, "max_new_tokens": max_new_tokens, "ignore_eos": True},
        "stream": True,
        "return_logprob": logprobs,
    }
    if dp_rank is not None:
        body["routed_dp_rank"] = dp_rank
    if rid is not None:
        body["rid"] = rid
    last: dict = {}
    chunks = 0
    for event in _events(f"{url}/generate", body, timeout_s):
        last, chunks = event, chunks + 1
    meta = last.get("meta_info") or {}
    if not meta.get("finish_reason"):
        raise RuntimeError(f"/generate ended without a finish reason after {chunks} chunks: {last}")
    scores = meta.get("output_token_logprobs")
    return Answer(
        tokens=last["output_ids"],
        dp_rank=meta.get("dp_rank"),
        verify_steps=meta.get("spec_verify_ct"),
        accepted=meta.get("spec_num_correct_drafts"),
        cached_tokens=meta.get("cached_tokens") or 0,
        chunks=chunks,
        finish=meta["finish_reason"]["type"],
        logprobs=[entry[0] for entry in scores] if scores else None,
    )


def chat(url: str, content: str, max_new_tokens: int, *, timeout_s: float = 120, dp_rank: int | None = None) -> Answer:
    """``POST /v1/chat/completions``, streamed, of a model with the tiny tokenizer (one word ``w<id>`` per token).

    The route does not say which DP rank answered, so ``dp_rank`` pins one and is what the record carries.

    Raises:
        As :func:`generate`.
    """
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_spec_tokens_details": True,
    }
    if dp_rank is not None:
        body["routed_dp_rank"] = dp_rank
    text, finish, chunks, details = "", "", 0, {}
    for event in _events(f"{url}/v1/chat/completions", body, timeout_s):
        for part in (event, *event.get("choices", [])):
            details = (part.get("sglext") or {}).get("spec_tokens_details") or details
        for choice in event.get("choices", []):
            if piece := choice["delta"].get("content"):
                text, chunks = text + piece, chunks + 1
            finish = choice.get("finish_reason") or finish
    if not finish:
        raise RuntimeError(f"/v1/chat/completions ended without a finish reason after {chunks} chunks")
    return Answer(
        tokens=[int(word.removeprefix("w")) for word in text.split()],
        dp_rank=dp_rank,
        verify_steps=details.get("spec_verify_ct"),
        accepted=details.get("spec_num_correct_drafts"),
        cached_tokens=0,
        chunks=chunks,
        finish=finish,
    )


def generate_many(
    url: str, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], **kw
) -> list[Answer]:
    """All prompts at once, answers in the prompts' order. A list of ``max_new_tokens`` gives each its own length."""
    lengths = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    with ThreadPoolExecutor(max(1, len(prompts))) as pool:
        return list(pool.map(lambda p, n: generate(url, p, n, **kw), prompts, lengths))


def _events(url: str, body: dict, timeout_s: float) -> Iterator[dict]:
    with requests.post(url, json=body, stream=True, timeout=(10, timeout_s)) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{url} answered {response.status_code}: {response.text[:500]}")
        for line in response.iter_lines():
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(f"{url}: {event['error']}")
            yield event
