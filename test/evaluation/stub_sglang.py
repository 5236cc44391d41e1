"""A stand-in for a server, for failures that a real one does not give on demand: it answers the routes that the
accuracy tool asks, in SGLang 0.5.23's shapes, and does what ``behave`` says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Refusal(NamedTuple):
    """An HTTP error in place of an answer."""

    status: int
    message: str


Behaviour = Callable[[int, dict], "dict | Refusal"]


def chat_answer(
    text: str,
    tokens: list[int],
    *,
    dp_rank: int | None = 0,
    verify: int = 4,
    kept: int = 12,
    finish: str = "stop",
    **meta,
) -> dict:
    """A chat answer with the figures of a request; ``verify=0`` leaves acceptance out, as SGLang does."""
    spec = {
        "spec_verify_ct": verify,
        "spec_num_correct_drafts": kept,
        "spec_correct_drafts_histogram": [1, 0, verify // 2, verify - 1 - verify // 2],
    }
    return {
        "id": "stub",
        "object": "chat.completion",
        "created": 0,
        "model": "tiny",
        "usage": {"prompt_tokens": 3, "completion_tokens": len(tokens), "total_tokens": 3 + len(tokens)},
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": finish,
                "response_token_ids": tokens,
                "meta_info": {
                    "completion_tokens": len(tokens),
                    "dp_rank": dp_rank,
                    "finish_reason": {"type": finish},
                    **(spec if verify else {}),
                    **meta,
                },
            }
        ],
    }


def server_info(dp_ranks: int = 2, **changes) -> dict:
    """What `/server_info` says of a DFLASH server with DP attention, as far as the tool looks at it."""
    return {
        "tp_size": dp_ranks,
        "dp_size": 1,
        "attn_dp_size": dp_ranks,
        "model_path": "/models/tiny",
        "served_model_name": "tiny",
        "version": "0.5.23",
        "speculative_algorithm": "DFLASH",
        "disaggregation_mode": "null",
        "internal_states": [{} for _ in range(dp_ranks)],
        **changes,
    }


class StubServer:
    """``behave(number, body)`` gives the answer to chat request ``number`` (0 is the tool's probe), or a refusal."""

    def __init__(self, behave: Behaviour, dp_ranks: int = 2, **info) -> None:
        self.behave, self.dp_ranks, self.asked = behave, dp_ranks, 0
        self.info = server_info(dp_ranks, **info)
        self.running = 0
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> StubServer:
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """From here on nobody listens."""
        self._http.shutdown()
        self._http.server_close()

    def answer(self, path: str, body: dict) -> dict | Refusal:
        route = path.partition("?")[0]
        if route == "/server_info":
            return self.info
        if route == "/v1/loads":
            load = {"num_running_reqs": self.running, "num_waiting_reqs": 0}
            return {"loads": [{"dp_rank": rank, **load} for rank in range(self.dp_ranks)]}
        if route == "/flush_cache":
            return {}
        with self._lock:
            number, self.asked = self.asked, self.asked + 1
        return self.behave(number, body)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                answer = stub.answer(self.path, json.loads(self.rfile.read(length) or b"{}"))
                status, body = (
                    (answer.status, {"message": answer.message}) if isinstance(answer, Refusal) else (200, answer)
                )
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        return Handler
