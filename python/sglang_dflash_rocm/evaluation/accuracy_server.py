"""What the accuracy tool asks of a running SGLang server: is it real, is it idle, what did its ranks accept."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException

from . import server_info
from .server_info import Fact, ServerRefused

_POLL_S = 0.5


class ServerGone(Exception):
    """The server answered before and does not any more."""


class LiveServer:
    """Requests to one server, never through a proxy."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url = base_url
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self, route: str, body: Mapping | None = None, timeout_s: float = 30) -> bytes:
        """Body of a 200 answer; POST if there is a ``body``, else GET.

        Raises:
            ServerRefused: any other answer; the message has its text.
            ServerGone: no answer.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.base_url}{route}", data=data, headers=self._headers)
        try:
            with self._opener.open(request, timeout=timeout_s) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace").strip()[:500]
            raise ServerRefused(f"{self.base_url}{route} answered {error.code}: {text}") from None
        except (OSError, HTTPException) as error:
            raise ServerGone(f"{self.base_url}{route} does not answer: {error}") from None

    def info(self) -> dict:
        """`/server_info`.

        Raises:
            ServerRefused: the answer is not SGLang's.
            ServerGone: no answer.
        """
        info = self._json("/server_info")
        if not isinstance(info, dict) or not isinstance(info.get("internal_states"), list) or "tp_size" not in info:
            raise ServerRefused(f"{self.base_url}/server_info is not SGLang's: no tp_size or internal_states in it")
        return info

    def accept_lengths(self) -> dict[int, float | None]:
        """The server's own accept length by DP rank. `/server_info` has the same numbers, in the order in which the
        ranks answered and without their names."""
        return {load["dp_rank"]: (load.get("speculative") or {}).get("accept_length") for load in self._loads()}

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until no DP rank has a request.

        Raises:
            ServerRefused: not within the time; the message says which ranks are busy.
            ServerGone: no answer.
        """
        end = time.monotonic() + timeout_s
        while busy := [load for load in self._loads() if load["num_running_reqs"] + load["num_waiting_reqs"]]:
            if time.monotonic() > end:
                who = ", ".join(
                    f"DP rank {load['dp_rank']}: {load['num_running_reqs']} running, {load['num_waiting_reqs']} waiting"
                    for load in busy
                )
                raise ServerRefused(f"the server is not idle after {timeout_s:.0f} s ({who}): stop its other clients")
            time.sleep(_POLL_S)

    def flush(self, timeout_s: float) -> None:
        """Empty the caches of all DP ranks and set their accept totals to zero.

        SGLang answers for the first rank that replies, so the totals of the others are looked at.

        Raises:
            ServerRefused: a rank was not idle, or kept its totals.
            ServerGone: no answer.
        """
        self.ask(f"/flush_cache?timeout={timeout_s:.0f}", body={}, timeout_s=timeout_s + 30)
        end = time.monotonic() + timeout_s
        while kept := [s for s in self.info()["internal_states"] if s.get("avg_spec_accept_length") is not None]:
            if time.monotonic() > end:
                raise ServerRefused(
                    f"/flush_cache did not reach {len(kept)} of the DP ranks: their accept totals are not zero; "
                    "stop the server's other clients and try again"
                )
            time.sleep(_POLL_S)

    def probe(self, model: str) -> dict:
        """`choices[0]` of a short chat answer, asked with the flags of `REQUEST_FLAGS`."""
        body = {"model": model, "messages": [{"role": "user", "content": "1 + 1 ="}], "max_tokens": 8, "temperature": 0}
        return json.loads(self.ask("/v1/chat/completions", {**body, **REQUEST_FLAGS}, timeout_s=300))["choices"][0]

    def _loads(self) -> list[dict]:
        return self._json("/v1/loads")["loads"]

    def _json(self, route: str):
        try:
            return json.loads(self.ask(route))
        except ValueError:
            raise ServerRefused(f"{self.base_url}{route} did not answer with JSON: not an SGLang server") from None


#: What every request asks for on top: SGLang's figures of the request, and the tokens of the answer.
REQUEST_FLAGS = {"return_meta_info": True, "return_token_ids": True}


def facts(info: Mapping) -> dict[str, Fact]:
    """What of `/server_info` goes into a record: flags, and the variables that the server tells."""
    told = sorted((server_info.environment(info) or {}).items())
    return server_info.flags(info) | {f"env {name}": value for name, value in told}


def refusals(info: Mapping) -> list[str]:
    """Why nothing that this server answers is the model's accuracy; empty if nothing is known against it."""
    states = [info, *info["internal_states"]]
    reasons = []
    modes = {state.get("disaggregation_mode") or "null" for state in states} - {"null"}
    if modes:
        fake = info.get("disaggregation_transfer_backend") == "fake"
        what = "fake prefill: its KV cache holds no prompt" if fake else "one half of a disaggregated deployment"
        reasons.append(f"--disaggregation-mode {', '.join(sorted(modes))} ({what})")
    reasons += [f"{flag}: random weights" for flag in server_info.dummy_weights(info)]
    simulations = server_info.simulations(info).items()
    return [*reasons, *(f"{name}={value}: {server_info.SIMULATING[name]}" for name, value in simulations)]
