"""What a benchmark asks of a running SGLang server before it measures: what it is, and what of it is not real."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from urllib.parse import urlsplit

from sglang_dflash_rocm.evaluation import records, server_info
from sglang_dflash_rocm.evaluation.records import Provenance
from sglang_dflash_rocm.evaluation.server_info import Fact, ServerRefused


@dataclass(frozen=True)
class ServerFacts:
    """``facts``: flags that matter. ``simulated_accept``: accept length that the server is known to simulate, and
    ``simulated_experts``: what replaces its router, in words; it only tells them when it runs with
    ``SGLANG_EXPOSE_OWN_ENV_VARS=1``. ``dummy``: its weights are not a checkpoint's."""

    facts: dict[str, Fact]
    simulated_accept: float | None
    simulated_experts: tuple[str, ...]
    dummy: bool

    @property
    def fake_prefill(self) -> bool:
        return server_info.is_fake_prefill(self.facts)


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
    simulations = server_info.simulations(info)
    accept = simulations.pop("SGLANG_SIMULATE_ACC_LEN", None)
    experts = tuple(server_info.SIMULATING[name] for name in simulations)
    dummy = bool(server_info.dummy_weights(info))
    return ServerFacts(server_info.flags(info), None if accept is None else float(accept), experts, dummy)


def accept_lengths(info: Mapping) -> tuple[float | None, ...]:
    """Mean accept length of each DP rank, bonus token included, in the order in which the ranks answered: SGLang does
    not name them here. Empty without speculation."""
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
    stamps += server.simulated_experts
    if server.dummy:
        stamps.append("dummy weights")
    return tuple(stamps)


def provenance(tool: str, server: ServerFacts, stamps: tuple[str, ...]) -> Provenance:
    """Of a run that starts now."""
    return Provenance(tool=tool, started=records.utc_now(), versions=versions(), server=server.facts, simulated=stamps)


def versions() -> dict[str, str]:
    """Installed versions on the client's side; what is not installed is left out."""
    found = {}
    for name in ("sglang-dflash-rocm", "sglang", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def listening(url: str) -> bool:
    """Whether anything accepts connections at the URL's address. A busy server does; a dead one does not."""
    place = urlsplit(url)
    port = place.port or (443 if place.scheme == "https" else 80)
    try:
        with socket.create_connection((place.hostname, port), timeout=5):
            return True
    except OSError:
        return False
