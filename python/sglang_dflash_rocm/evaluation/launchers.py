"""Server launchers: ``python -m sglang_dflash_rocm.evaluation.launchers accuracy``, or the scripts in `evaluation/`.

Each becomes the server (exec), so that signals reach it. What it starts follows from environment variables
(`launcher_settings.py`). All that is wrong with them, or with the checkpoint, is said at once, before anything starts.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import typer

from sglang_dflash_rocm import checkpoint
from sglang_dflash_rocm.evaluation import launcher_settings as settings
from sglang_dflash_rocm.evaluation.server_info import SIMULATING
from sglang_dflash_rocm.evaluation.variables import plain_table

EXIT_WRONG = 2


@dataclass(frozen=True)
class Launcher:
    """One deployment on eight GPUs. ``dp`` counts attention groups inside the TP group, or, without ``dp_attention``,
    replicas of it. ``fake_prefill`` is a decode server whose KV cache holds no prompt, for benchmarks only."""

    name: str
    script: str
    doc: str
    tp: int
    dp: int
    dp_attention: bool
    fake_prefill: bool

    @property
    def attention_groups(self) -> int:
        """DP attention groups within one TP group."""
        return self.dp if self.dp_attention else 1

    @property
    def replicas(self) -> int:
        return 1 if self.dp_attention else self.dp


LAUNCHERS = (
    Launcher(
        name="accuracy",
        script="launch_mimo_v26_flash_dp2_tp8_ep1_dpa_accuracy_baseline.sh",
        doc="TP8, two attention groups of TP4 (DP attention, DP LM head), EP1, DFLASH: what GSM8K is measured on",
        tp=8,
        dp=2,
        dp_attention=True,
        fake_prefill=False,
    ),
    Launcher(
        name="decode-fake-prefill",
        script="launch_mimo_v26_flash_dp2_tp8_ep1_dpa_decode_fake_prefill_baseline.sh",
        doc="the same as a decode server without a prefill server, acceptance simulated: decode benchmarks, no answers",
        tp=8,
        dp=2,
        dp_attention=True,
        fake_prefill=True,
    ),
    Launcher(
        name="tp4-decode-fake-prefill",
        script="launch_mimo_v26_flash_dp2_tp4_ep1_dflash_decode_fake_prefill_baseline.sh",
        doc="two replicas of TP4 without DP attention, for comparison: decode benchmarks, no answers",
        tp=4,
        dp=2,
        dp_attention=False,
        fake_prefill=True,
    ),
)


def problems(launcher: Launcher, env: Mapping[str, str]) -> list[str]:
    """Everything that keeps the server from starting, each with its fix. With ``DRY_RUN=1`` the checkpoint may be
    missing: then only the variables are looked at."""
    wrong = settings.wrong_values(env)
    usable = {name: value for name, value in env.items() if name not in wrong}
    found = [*wrong.values(), *_refusals(launcher, usable)]
    if not settings.DRY_RUN.get(usable):
        model = settings.MODEL_PATH.get(usable)
        found += checkpoint.problems(model, draft_path(usable), launcher.tp, launcher.attention_groups)
    return found


def _refusals(launcher: Launcher, env: Mapping[str, str]) -> Iterator[str]:
    """Values that are allowed as such and not here."""
    if settings.SGLANG_FLYPA_MIMO_PREFILL.get(env):
        yield (
            "SGLANG_FLYPA_MIMO_PREFILL=1: the FlyPA prefill kernel is not shipped yet; set 0 (prefill runs on SGLang's "
            "Triton kernels)"
        )
    if settings.ENABLE_TWO_BATCH_OVERLAP.get(env):
        yield (
            "ENABLE_TWO_BATCH_OVERLAP=1: SGLang 0.5.23 cannot split a DFLASH verify into two batches "
            "(batch_overlap/two_batch_overlap.py reads EAGLE's fields); set 0"
        )
    backend = settings.ATTENTION_BACKEND.get(env)
    if env.get(settings.SGLANG_AITER_PA_DECODE_IMPL.name, "").strip() and backend != "flydsl":
        yield f"SGLANG_AITER_PA_DECODE_IMPL=flydsl and ATTENTION_BACKEND={backend} contradict each other; unset one"
    if launcher.fake_prefill:
        if not settings.DISABLE_RADIX_CACHE.get(env):
            yield "DISABLE_RADIX_CACHE=0: SGLang runs a decode server without the prefix cache; set 1"
        if settings.MM_ENABLE_DP_ENCODER.get(env):
            yield "MM_ENABLE_DP_ENCODER=1: a decode server encodes no images; set 0"
    else:
        for name in SIMULATING:
            if env.get(name, "").strip():
                yield f"{name}={env[name]}: a server with anything simulated measures no accuracy; unset it"
        page, chunk = settings.PAGE_SIZE.get(env), settings.CHUNKED_PREFILL_SIZE.get(env)
        if chunk % (page * launcher.attention_groups):
            yield (
                f"CHUNKED_PREFILL_SIZE={chunk}: must be a multiple of {page * launcher.attention_groups}, "
                f"PAGE_SIZE {page} times {launcher.attention_groups} attention groups"
            )


def draft_path(env: Mapping[str, str]) -> Path:
    """The draft's directory."""
    return settings.DRAFT_MODEL_PATH.get(env) or settings.MODEL_PATH.get(env) / "dflash"


def arguments(launcher: Launcher, env: Mapping[str, str]) -> list[str]:
    """Arguments of ``sglang.launch_server``."""
    backend = settings.ATTENTION_BACKEND.get(env)
    flags = {
        "--model-path": settings.MODEL_PATH.get(env),
        "--host": settings.HOST.get(env),
        "--port": settings.PORT.get(env),
        "--tp-size": launcher.tp,
        "--dp-size": launcher.dp,
        "--ep-size": 1,
        "--attention-backend": backend,
        "--speculative-draft-attention-backend": backend,
        "--page-size": settings.PAGE_SIZE.get(env),
        "--kv-cache-dtype": "bf16",
        "--chunked-prefill-size": settings.CHUNKED_PREFILL_SIZE.get(env),
        "--mem-fraction-static": settings.MEM_FRACTION_STATIC.get(env),
        "--swa-full-tokens-ratio": settings.SWA_FULL_TOKENS_RATIO.get(env),
        # SGLang divides by the attention groups; a replica takes the number for itself.
        "--max-running-requests": settings.MAX_RUNNING_REQUESTS.get(env) // launcher.replicas,
        "--speculative-algorithm": "DFLASH",
        "--speculative-draft-model-path": draft_path(env),
        "--speculative-num-draft-tokens": settings.BLOCK_SIZE,
        "--reasoning-parser": "mimo",
        "--tool-call-parser": "mimo",
    }
    argv = [str(word) for pair in flags.items() for word in pair]
    argv.append("--trust-remote-code")
    if launcher.dp_attention:
        argv += ["--enable-dp-attention", "--enable-dp-lm-head"]
    if settings.DISABLE_RADIX_CACHE.get(env):
        argv.append("--disable-radix-cache")
    if launcher.fake_prefill:
        argv += ["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake"]
    else:
        argv += _vision_flags(env)
    return [*argv, *settings.EXTRA_ARGS.get(env)]


def _vision_flags(env: Mapping[str, str]) -> list[str]:
    """Under DP attention SGLang 0.5.23 refuses to build a vision tower that is sharded, and refuses
    --language-model-only for MiMo. As the language half of a server whose encoders never come, with embeddings sent to
    the tokenizer process, it serves text as usual and answers images with 503."""
    if settings.MM_ENABLE_DP_ENCODER.get(env):
        return ["--mm-enable-dp-encoder"]
    return ["--language-only", "--encoder-transfer-backend", "zmq_to_tokenizer"]


def environment(launcher: Launcher, env: Mapping[str, str]) -> dict[str, str]:
    """What the server's environment has besides the caller's."""
    changes = {
        # The conversion of MXFP4 experts is in SGLang's aiter path only.
        "SGLANG_USE_AITER": "1",
        # What every reader of the pools takes as it is: extend gathers a prefix that lies otherwise.
        "SGLANG_AITER_KV_CACHE_LAYOUT": "nhd",
        # So that the accuracy tool and the benchmarks can ask the server whether anything is simulated.
        "SGLANG_EXPOSE_OWN_ENV_VARS": "1",
        "SGLANG_DSV4_FP4_DEQUANT": str(int(settings.WEIGHT_RECIPE.get(env) == settings.MXFP4_TO_FP8)),
    }
    if launcher.fake_prefill:
        changes |= {
            "SGLANG_SIMULATE_ACC_LEN": str(settings.SGLANG_SIMULATE_ACC_LEN.get(env)),
            "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
            # The other mode commits one constant token, which would send every request to the same experts.
            "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
        }
    return changes


def shell_line(launcher: Launcher, env: Mapping[str, str]) -> str:
    """The command as one can paste it into a shell."""
    assignments = [f"{name}={value}" for name, value in environment(launcher, env).items()]
    return shlex.join(["env", *assignments, *_server(launcher, env)])


def _server(launcher: Launcher, env: Mapping[str, str]) -> list[str]:
    return [sys.executable, "-m", "sglang.launch_server", *arguments(launcher, env)]


def launch(launcher: Launcher, env: Mapping[str, str]) -> None:
    """Check, print the command, become the server. Returns only after ``DRY_RUN=1``.

    Raises:
        SystemExit: 2, with every reason on stderr.
    """
    found = problems(launcher, env)
    if found:
        reasons = [f"  - {reason}" for reason in found]
        print("\n".join([f"{launcher.script} starts nothing:", *reasons]), file=sys.stderr)
        print("Unset a variable to get its default; --help lists them all.", file=sys.stderr)
        raise SystemExit(EXIT_WRONG)
    print(shell_line(launcher, env), flush=True)
    if settings.DRY_RUN.get(env):
        return
    command = _server(launcher, env)
    os.execvpe(command[0], command, {**env, **environment(launcher, env)})


def _command(launcher: Launcher) -> Callable[[], None]:
    def start() -> None:
        launch(launcher, os.environ)

    return start


app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False, help=__doc__)
for _launcher in LAUNCHERS:
    _variables = plain_table(settings.VARIABLES).replace("\n\n", "\n\n\b\n")
    app.command(_launcher.name, help=f"{_launcher.doc}.\n\n\b\n{_variables}")(_command(_launcher))

if __name__ == "__main__":
    app()
