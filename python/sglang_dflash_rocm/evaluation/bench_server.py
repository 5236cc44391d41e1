"""What a benchmark asks of a running SGLang server before it measures: what it is, and what of it is not real."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from urllib.parse import urlsplit

from sglang_dflash_rocm.evaluation.records import Provenance

#: Fields of SGLang's ``/server_info`` that change a benchmark's figures.
_FACTS = (
    "model_path",
    "version",
    "device",
    "dtype",
    "quantization",
    "load_format",
    "tp_size",
    "dp_size",
    "attn_dp_size",
    "ep_size",
    "enable_dp_attention",
    "enable_dp_lm_head",
    "attention_backend",
    "page_size",
    "kv_cache_dtype",
    "context_length",
    "chunked_prefill_size",
    "max_running_requests",
    "mem_fraction_static",
    "swa_full_tokens_ratio",
    "disable_radix_cache",
    "enable_two_batch_overlap",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "speculative_draft_attention_backend",
    "disaggregation_mode",
    "disaggregation_transfer_backend",
    "decode_log_interval",
)


class ServerRefused(Exception):
    """The server does not answer, or is not one that this benchmark is for; the message says what to do."""


@dataclass(frozen=True)
class ServerFacts:
    """``facts``: flags that matter. ``simulated_accept``: accept length that the server is known to simulate, which it
    only tells when it runs with ``SGLANG_EXPOSE_OWN_ENV_VARS=1``. ``dummy``: its weights are not a checkpoint's."""

    facts: dict[str, str | int | float | bool | None]
    simulated_accept: float | None
    dummy: bool

    @property
    def fake_prefill(self) -> bool:
        mode = self.facts.get("disaggregation_mode"), self.facts.get("disaggregation_transfer_backend")
        return mode == ("decode", "fake")


def ask(url: str, timeout_s: float = 30) -> ServerFacts:
    """What the server says of itself.

    Raises:
        ServerRefused: no answer, or not SGLang's.
    """
    try:
        with urllib.request.urlopen(f"{url}/server_info", timeout=timeout_s) as answer:
            info = json.load(answer)
        if not isinstance(info, dict) or "tp_size" not in info:
            raise ValueError("the answer has no tp_size")
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ServerRefused(
            f"BASE_URL={url}: no SGLang server answers at {url}/server_info ({error}); start one, or set BASE_URL"
        ) from None
    return facts_of(info)


def facts_of(info: Mapping) -> ServerFacts:
    """The same from a ``/server_info`` object."""
    kinds = (str, int, float, bool, type(None))
    facts = {name: info[name] for name in _FACTS if name in info and isinstance(info[name], kinds)}
    states = info.get("internal_states") or [{}]
    length = float((states[0].get("env_vars") or {}).get("SGLANG_SIMULATE_ACC_LEN") or -1)
    return ServerFacts(facts, length if length > 0 else None, info.get("load_format") == "dummy")


def accept_lengths(info: Mapping) -> tuple[float | None, ...]:
    """Mean accept length of each DP rank, bonus token included; empty without speculation."""
    if not info.get("speculative_algorithm"):
        return ()
    return tuple(state.get("avg_spec_accept_length") for state in info.get("internal_states") or [])


def check_mode(server: ServerFacts, fake_prefill: bool) -> None:
    """Prefill and sweep want a server that really prefills, the decode matrix one that does not.

    Raises:
        ServerRefused: the other kind.
    """
    mode = server.facts.get("disaggregation_mode")
    if fake_prefill and not server.fake_prefill:
        raise ServerRefused(
            f"the decode matrix needs a fake-prefill server (--disaggregation-mode decode "
            f"--disaggregation-transfer-backend fake), this one has --disaggregation-mode {mode} "
            f"--disaggregation-transfer-backend {server.facts.get('disaggregation_transfer_backend')}; start it with "
            "evaluation/mimo_v26_flash/launch_*_decode_fake_prefill_baseline.sh"
        )
    if not fake_prefill and mode not in (None, "null"):
        what = "a fake-prefill server computes no prefill" if server.fake_prefill else f"this server is PD mode {mode}"
        raise ServerRefused(f"prefill is measured on a server without PD disaggregation; {what}. Start another one")


def simulated(server: ServerFacts, fake_prefill: bool, declared_accept: float | None) -> tuple[str, ...]:
    """What is not real about a run on this server, in words.

    Raises:
        ServerRefused: the accept length that was declared is not the one that the server simulates.
    """
    if None not in (declared_accept, server.simulated_accept) and declared_accept != server.simulated_accept:
        raise ServerRefused(
            f"SGLANG_SIMULATE_ACC_LEN={declared_accept:g}: the server simulates {server.simulated_accept:g}; give the "
            "same value to both"
        )
    accept = declared_accept or server.simulated_accept
    stamps = []
    if fake_prefill:
        stamps.append("fake prefill")
    if accept:
        stamps.append(f"simulated acceptance {accept:g}")
    elif fake_prefill and server.facts.get("speculative_algorithm"):
        stamps.append("acceptance on an undefined KV cache")
    if server.dummy:
        stamps.append("dummy weights")
    return tuple(stamps)


def provenance(tool: str, server: ServerFacts, stamps: tuple[str, ...]) -> Provenance:
    """Of a run that starts now."""
    return Provenance(tool=tool, started=utc_now(), versions=versions(), server=server.facts, simulated=stamps)


def versions() -> dict[str, str]:
    """Installed versions on the client's side; what is not installed is left out."""
    found = {}
    for name in ("sglang-dflash-rocm", "sglang", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def utc_now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def listening(url: str) -> bool:
    """Whether anything accepts connections at the URL's address. A busy server does; a dead one does not."""
    place = urlsplit(url)
    port = place.port or (443 if place.scheme == "https" else 80)
    try:
        with socket.create_connection((place.hostname, port), timeout=5):
            return True
    except OSError:
        return False
