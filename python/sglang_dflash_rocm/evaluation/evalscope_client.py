"""evalscope in a process of its own: ``python -m sglang_dflash_rocm.evaluation.evalscope_client TASK.json``.

Its OpenAI client drops what SGLang says beside the answer. A model API of our own, registered the way evalscope offers,
keeps the figures of each request in the metadata of its prediction, so that they are on disk, and resumed, with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from pathlib import Path

from .acceptance import request_figures
from .gsm8k import EXTRA

MODEL_API = "sglang_with_figures"
KEY_VARIABLE = "EVALSCOPE_API_KEY"
TABLE = "table.txt"
"""Name of the file in evalscope's output folder that gets its table."""


def main(task_file: str) -> None:
    """Run the task, whose fields are those of evalscope's `TaskConfig`."""
    _end_with_parent()
    from evalscope.config import TaskConfig
    from evalscope.report import gen_table
    from evalscope.run import run_task

    _register()
    task = TaskConfig(**json.loads(Path(task_file).read_text()), eval_type=MODEL_API, api_key=os.environ[KEY_VARIABLE])
    reports = run_task(task)
    (Path(task.work_dir) / TABLE).write_text(gen_table(report_list=list(reports.values())) + "\n")


def _register() -> None:
    import msgspec
    from evalscope.api.registry import register_model_api
    from evalscope.models.openai_compatible import OpenAICompatibleAPI

    class SglangAPI(OpenAICompatibleAPI):
        _answer = threading.local()

        def on_response(self, response: dict) -> None:
            self._answer.choice = response["choices"][0]

        def generate(self, *args, **kwargs):
            self._answer.choice = None
            output = super().generate(*args, **kwargs)
            if self._answer.choice is not None:
                figures = msgspec.to_builtins(request_figures(self._answer.choice))
                output.metadata = {**(output.metadata or {}), EXTRA: figures}
            return output

    register_model_api(MODEL_API)(SglangAPI)


def _end_with_parent() -> None:
    """SIGTERM from the kernel when the tool that started us dies, however it does."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1])
