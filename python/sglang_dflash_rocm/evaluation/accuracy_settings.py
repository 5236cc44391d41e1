"""Settings of an accuracy run: environment variables, each also an option, all checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from sglang_dflash_rocm.environ import Variable, at_least

from .gates import Thresholds
from .variables import Reader, between, port, url

GSM8K_QUESTIONS = 1319
"""Size of GSM8K's test split."""


def _url(text: str) -> str:
    return url(text).removesuffix("/v1")


HOST = Variable("HOST", "127.0.0.1", str, "an address", "the server's address, where BASE_URL is not set")
PORT = Variable("PORT", 30000, port, "a port, 1 to 65535", "the server's port, where BASE_URL is not set")
LIMIT = Variable("LIMIT", None, at_least(1), "a whole number, 1 or more", "another name of NUM_QUESTIONS")
BASE_URL = Variable("BASE_URL", None, _url, "an address with http:// or https://", "the server; not set: HOST and PORT")
MODEL_PATH = Variable(
    "MODEL_PATH", None, str, "the server's --model-path", "the model that must be served; not set: whatever is served"
)
MIN_ACCEPT_LENGTH = Variable(
    "MIN_ACCEPT_LENGTH",
    4.0,
    between(0, 64),
    "tokens per verify step, 0 to 64",
    "least mean accept length of the DP ranks; 0: not looked at, for a server without speculation",
)
MIN_ACCURACY = Variable(
    "MIN_ACCURACY", 0.97, between(0, 1), "a share, 0 to 1 (0.97, not 97)", "least share of right answers"
)
NUM_QUESTIONS = Variable(
    "NUM_QUESTIONS", None, at_least(1), "a whole number, 1 or more", "questions, the first ones; not set: all"
)
DATASET_PATH = Variable(
    "DATASET_PATH", None, Path, "a folder", "GSM8K on disk; not set: evalscope downloads it from ModelScope"
)
FEW_SHOT = Variable("FEW_SHOT", 4, at_least(0), "a whole number, 0 or more", "solved examples in every prompt")
MAX_TOKENS = Variable("MAX_TOKENS", 4096, at_least(1), "a whole number, 1 or more", "tokens at which an answer is cut")
EVAL_BATCH_SIZE = Variable(
    "EVAL_BATCH_SIZE", 64, at_least(1), "a whole number, 1 or more", "questions that are with the server at once"
)
REQUEST_TIMEOUT_S = Variable(
    "REQUEST_TIMEOUT_S", 1200, at_least(1), "whole seconds, 1 or more", "an answer that takes longer has failed"
)
WORK_DIR = Variable(
    "WORK_DIR", None, Path, "a folder", "all that the run writes; the same one goes on with it; not set: a new one"
)
API_KEY = Variable("API_KEY", "EMPTY", str, "text", "the server's --api-key")

#: Every variable that is also an option; the option's name is the variable's in lower case with dashes.
VARIABLES: tuple[Variable, ...] = (
    BASE_URL,
    HOST,
    PORT,
    MODEL_PATH,
    MIN_ACCURACY,
    MIN_ACCEPT_LENGTH,
    NUM_QUESTIONS,
    LIMIT,
    DATASET_PATH,
    FEW_SHOT,
    MAX_TOKENS,
    EVAL_BATCH_SIZE,
    REQUEST_TIMEOUT_S,
    WORK_DIR,
    API_KEY,
)


@dataclass(frozen=True)
class Settings:
    """One field per variable, in lower case. `base_url` and `num_questions` stand for their two names each."""

    base_url: str
    model_path: str | None
    min_accuracy: float
    min_accept_length: float
    num_questions: int | None
    dataset_path: Path | None
    few_shot: int
    max_tokens: int
    eval_batch_size: int
    request_timeout_s: int
    work_dir: Path | None
    api_key: str

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(min_accuracy=self.min_accuracy, min_accept_length=self.min_accept_length)


def read_settings(environment: Mapping[str, str], options: Mapping[str, str | None]) -> Settings:
    """Settings from the environment and from options (by field name, None if not given), which win.

    Raises:
        WrongSettings: all problems at once.
    """
    given = {name.upper(): value for name, value in options.items() if value is not None}
    env = {**environment, **given}
    if "NUM_QUESTIONS" in given or "LIMIT" in given:  # an option beats the variable of its other name too
        env |= {name: "" for name in ("NUM_QUESTIONS", "LIMIT") if name not in given}
    reader = Reader(env)
    values = {variable.name.lower(): reader.get(variable) for variable in VARIABLES}
    limit, host, number = (values.pop(name, None) for name in ("limit", "host", "port"))
    if limit and values.get("num_questions") not in (None, limit):
        reader.problems.append(
            f"NUM_QUESTIONS={values['num_questions']} and LIMIT={limit} are two names of one setting: drop one"
        )
    reader.finish()
    values["num_questions"] = values["num_questions"] or limit
    values["base_url"] = values["base_url"] or f"http://{host}:{number}"
    return Settings(**{field.name: values[field.name] for field in fields(Settings)})
