"""What SGLang 0.5.23 makes of command lines: ``python launcher_resolution.py < cases.json > results.json``.

Runs what `sglang.launch_server` runs before it starts a process: our plugin, SGLang's parser, its resolution and its
checks. HARDWARE WE DO NOT HAVE: that there is a gfx942 GPU, that torch is a ROCm build, and that a GPU has 192 GiB is
asserted here; nothing else is faked. Importing takes 20 s, so all cases are resolved by one process, each in a fork of
it: a resolution changes the environment and module state. A case with ``code`` instead is just run.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path

FIELDS = (
    "attention_backend",
    "attn_dp_size",
    "chunked_prefill_size",
    "disable_radix_cache",
    "disaggregation_mode",
    "disaggregation_transfer_backend",
    "dp_size",
    "enable_dp_lm_head",
    "ep_size",
    "kv_cache_dtype",
    "language_only",
    "max_running_requests",
    "mem_fraction_static",
    "mm_enable_dp_encoder",
    "moe_runner_backend",
    "page_size",
    "reasoning_parser",
    "speculative_algorithm",
    "speculative_draft_attention_backend",
    "speculative_num_draft_tokens",
    "swa_full_tokens_ratio",
    "tp_size",
)


def main() -> None:
    cases = json.load(sys.stdin)
    # What is printed is the result; everything else goes where errors go.
    out, sys.stdout = sys.stdout, sys.stderr
    _prepare(cases[0]["argv"])
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(cases):
            if os.fork() == 0:
                _in_fork(case, Path(folder) / str(number))
            os.wait()
        json.dump([json.loads((Path(folder) / str(number)).read_text()) for number in range(len(cases))], out)


def _prepare(argv: list[str]) -> None:
    from sglang_dflash_rocm import gate

    gate.gfx942_present = lambda: True
    # SGLang's processes inherit the launcher's arguments, and our plugin looks at them.
    sys.argv = ["sglang.launch_server", *argv]
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.utils import common

    common.is_hip = lambda: True
    common.get_amdgpu_memory_capacity = lambda: 192 * 1024


def _in_fork(case: dict, path: Path) -> None:
    result: dict = {}
    errors = io.StringIO()
    try:
        os.environ.update(case.get("env", {}))
        with contextlib.redirect_stderr(errors):
            if "code" in case:
                exec(case["code"], {})
            else:
                result["resolved"] = _resolve(case["argv"])
    except BaseException as error:  # argparse ends the process, SGLang asserts
        result["error"] = f"{type(error).__name__}: {error} {errors.getvalue()[-2000:]}"
    path.write_text(json.dumps(result))
    os._exit(0)


def _resolve(argv: list[str]) -> dict:
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args([*argv, "--device", "cuda"])
    server_args.resolve_once()
    server_args.check_server_args()
    view = resolved_view(server_args)
    return {name: getattr(view, name) for name in FIELDS}


if __name__ == "__main__":
    main()
