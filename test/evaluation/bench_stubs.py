"""Stand-ins for failure paths: a server that only says what it is, and a client that does what a test needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
REAL = {"tp_size": 2, "dp_size": 2, "disaggregation_mode": "null", "model_path": "tiny", "internal_states": [{}, {}]}
FAKE_PREFILL = {
    **REAL,
    "disaggregation_mode": "decode",
    "disaggregation_transfer_backend": "fake",
    "speculative_algorithm": "DFLASH",
}


class StubServer:
    """Answers ``/server_info`` with ``info`` from a process of its own, until it is killed."""

    def __init__(self, info: dict) -> None:
        # Here, because the stub client starts often and has no use for them.
        from sglang_dflash_rocm.evaluation.bench_server import listening
        from sglang_dflash_rocm.testing.server import free_port

        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen([sys.executable, __file__, "server", str(self.port), json.dumps(info)])
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if listening(self.url):
                return
            time.sleep(0.05)
        raise TimeoutError("the stub server does not listen")

    def __enter__(self) -> StubServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def stub_command(arguments: list[str]) -> list[str]:
    """The real client's command line, run by :func:`client` instead."""
    return [arguments[0], __file__, "client", *arguments[3:]]


def result(prompts: int, accept: list[float | None] = (), **changes) -> dict:
    """A result as the real client writes it, as far as it is read."""
    spread = {
        f"{kind}_{name}_ms": 10.0 for name in ("tpot", "e2e_latency") for kind in ("mean", "median", "p90", "p99")
    }
    states = [{} if length is None else {"avg_spec_accept_length": length} for length in accept]
    return {
        "duration": 2.0,
        "completed": prompts,
        "total_output_tokens": prompts * 4,
        "input_lens": [100] * prompts,
        "ttfts": [0.1 * (i + 1) for i in range(prompts)],
        "itls": [[0.01] * 3] * prompts,
        "errors": [""] * prompts,
        "server_info": {"speculative_algorithm": "DFLASH", "internal_states": states},
        **spread,
        **changes,
    }


def client(arguments: list[str]) -> int:
    """``STUB_FAIL``: part of a command line whose cell fails. ``STUB_HANG``: likewise, it never ends.
    ``STUB_KILL``: a process that it kills before it hangs."""
    flags = dict(zip(arguments, arguments[1:], strict=False))
    line = " ".join(arguments)
    prompts = int(flags["--num-prompts"])
    print(f"stub client: {line}", flush=True)
    if pid := os.environ.get("STUB_KILL"):
        os.kill(int(pid), 9)
        time.sleep(600)
    if (text := os.environ.get("STUB_HANG")) and text in line:
        Path(os.environ["STUB_PID_FILE"]).write_text(str(os.getpid()))
        time.sleep(600)
    if (text := os.environ.get("STUB_FAIL")) and text in line:
        print("ValueError: planted fault", flush=True)
        return 1
    accept = json.loads(os.environ.get("STUB_ACCEPT", "[]"))
    with open(flags["--output-file"], "a") as file:
        file.write(json.dumps(result(prompts, accept)) + "\n")
    return 0


def server(port: int, info: str) -> None:
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/server_info" else 404)
            self.end_headers()
            self.wfile.write(info.encode())

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def command(name: str) -> None:
    """The real command with the stub client."""
    import typer

    from sglang_dflash_rocm.evaluation import bench_client, matrix, sweep_run

    real = bench_client.command
    bench_client.command = lambda *given: stub_command(real(*given))
    typer.run({"matrix": matrix.main, "sweep": sweep_run.main}[name])


if __name__ == "__main__":
    part = sys.argv.pop(1)
    if part == "server":
        server(int(sys.argv[1]), sys.argv[2])
    elif part == "client":
        sys.exit(client(sys.argv[1:]))
    else:
        command(part)
