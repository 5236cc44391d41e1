"""Command line of the GSM8K accuracy run."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from . import gsm8k
from .accuracy_folder import FolderRefused
from .accuracy_run import OK, evalscope_task, run
from .accuracy_server import ServerGone
from .accuracy_settings import GSM8K_QUESTIONS, VARIABLES, Settings, read_settings
from .server_info import ServerRefused
from .variables import WrongSettings

_REFUSED, _INTERRUPTED = 2, 130

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


def _option(name: str):
    variable = next(v for v in VARIABLES if v.name == name)
    default = "" if variable.default is None else f" (default {variable.default})"
    return typer.Option(metavar=name, help=f"{variable.doc}: {variable.allowed}{default}")


@app.command()
def gsm8k_accuracy(
    base_url: Annotated[str | None, _option("BASE_URL")] = None,
    host: Annotated[str | None, _option("HOST")] = None,
    port: Annotated[str | None, _option("PORT")] = None,
    model_path: Annotated[str | None, _option("MODEL_PATH")] = None,
    min_accuracy: Annotated[str | None, _option("MIN_ACCURACY")] = None,
    min_accept_length: Annotated[str | None, _option("MIN_ACCEPT_LENGTH")] = None,
    num_questions: Annotated[str | None, _option("NUM_QUESTIONS")] = None,
    limit: Annotated[str | None, _option("LIMIT")] = None,
    dataset_path: Annotated[str | None, _option("DATASET_PATH")] = None,
    few_shot: Annotated[str | None, _option("FEW_SHOT")] = None,
    max_tokens: Annotated[str | None, _option("MAX_TOKENS")] = None,
    eval_batch_size: Annotated[str | None, _option("EVAL_BATCH_SIZE")] = None,
    request_timeout_s: Annotated[str | None, _option("REQUEST_TIMEOUT_S")] = None,
    work_dir: Annotated[str | None, _option("WORK_DIR")] = None,
    api_key: Annotated[str | None, _option("API_KEY")] = None,
    prepare_dataset: Annotated[
        bool, typer.Option("--prepare-dataset", help="give DATASET_PATH the README.md that it needs, and stop")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", envvar="DRY_RUN", help="check settings and data set, print the task, and stop")
    ] = False,
) -> None:
    """GSM8K accuracy and accept length of a running SGLang server, through evalscope.

    Every option with a name in capitals is also an environment variable of that name; the option wins.

    Exit code: 0 passed, 1 a gate failed, 2 refused (settings, data set, folder or server), 3 the run broke, 130
    interrupted.
    """
    options = {name: value for name, value in locals().items() if name not in ("prepare_dataset", "dry_run")}
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        settings = read_settings(os.environ, options)
        if prepare_dataset:
            print(gsm8k.prepare_dataset(_dataset(settings)))
            code = OK
        elif dry_run:
            questions = _questions(settings)
            print(
                json.dumps(
                    evalscope_task(settings, "<served model>", "<model>", Path("<WORK_DIR>"), questions), indent=1
                )
            )
            code = OK
        else:
            code = run(settings, _questions(settings))
    except (WrongSettings, gsm8k.DatasetError, FolderRefused, ServerRefused, ServerGone) as error:
        print(f"refused: {error}", file=sys.stderr)
        code = _REFUSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = _INTERRUPTED
    raise typer.Exit(code)


def _questions(settings: Settings) -> int:
    """How many questions the run is to ask.

    Raises:
        DatasetError: the local folder is not what evalscope needs.
        WrongSettings: more are wanted than there are.
    """
    if settings.dataset_path is not None:
        return gsm8k.check_dataset(settings.dataset_path, settings.few_shot, settings.num_questions)
    if (settings.num_questions or 0) > GSM8K_QUESTIONS:
        raise WrongSettings(
            f"NUM_QUESTIONS={settings.num_questions}: GSM8K's test split has {GSM8K_QUESTIONS} questions"
        )
    return settings.num_questions or GSM8K_QUESTIONS


def _dataset(settings: Settings) -> Path:
    if settings.dataset_path is None:
        raise WrongSettings("--prepare-dataset needs DATASET_PATH, the folder with train.jsonl and test.jsonl")
    return settings.dataset_path


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    app()
