"""Nightly: MiMo-V2.6-Flash on eight MI300X, TP8 with two DP attention groups and DFLASH, answers GSM8K.

Does what the evaluation guide does: the accuracy launcher, then the accuracy tool, whose exit code says whether the
thresholds hold: 97 % of all 1319 questions, accept length 5.0. HARDWARE WE DO NOT HAVE: without eight gfx942 GPUs and a
checkpoint (MODEL_PATH) it skips, and so far it never did anything else. EVAL_PYTHON names the interpreter that has
evalscope, where it is not this one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sglang.test.ci.ci_register import register_amd_ci

from sglang_dflash_rocm.gate import gfx942_present
from sglang_dflash_rocm.testing.launched import LaunchedServer

register_amd_ci(est_time=5400, suite="nightly-amd-8-gpu", nightly=True)

EVALUATION = Path(__file__).parents[3] / "evaluation"
LAUNCHER = EVALUATION / "mimo_v26_flash" / "launch_mimo_v26_flash_dp2_tp8_ep1_dpa_accuracy_baseline.sh"
ACCURACY = EVALUATION / "run_evalscope_gsm8k_accuracy.py"
MODEL_PATH = os.environ.get("MODEL_PATH", "")
#: Loading 309 B parameters and making the experts FP8.
READY_S = 3600
GSM8K_S = 3600


def why_not() -> str:
    """What is missing for this test; empty if nothing is."""
    if not gfx942_present() or torch.cuda.device_count() < 8:
        return "needs eight gfx942 GPUs (MI300X)"
    if not Path(MODEL_PATH, "config.json").is_file():
        return "needs MODEL_PATH, the directory of MiMo-V2.6-Flash"
    return ""


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.timeout(READY_S + GSM8K_S + 600)
def test_gsm8k(tmp_path):
    variables = {"MODEL_PATH": MODEL_PATH, "PYTHON": sys.executable}
    with LaunchedServer(LAUNCHER, variables, tmp_path / "server.log") as server:
        server.wait_ready(READY_S)
        assert not server.swallowed_errors()
        done = subprocess.run(
            [os.environ.get("EVAL_PYTHON", sys.executable), str(ACCURACY)],
            env={
                **os.environ,
                "BASE_URL": server.url,
                "MIN_ACCURACY": "0.97",
                "MIN_ACCEPT_LENGTH": "5.0",
                "WORK_DIR": str(tmp_path / "gsm8k"),
            },
            capture_output=True,
            text=True,
            timeout=GSM8K_S,
        )
        print(done.stdout)
        assert done.returncode == 0, server.failure(done.stdout[-4000:] + done.stderr[-4000:])
    assert not server.leftovers()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
