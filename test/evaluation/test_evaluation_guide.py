"""Every command of the guide is one that can be run, and `evaluation/README.md` lists what there is."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main

from sglang_dflash_rocm.cli.main import app
from sglang_dflash_rocm.evaluation import launcher_settings as settings
from sglang_dflash_rocm.evaluation.launchers import LAUNCHERS, arguments

ROOT = Path(__file__).parents[2]
EVALUATION = ROOT / "evaluation"
GUIDE = EVALUATION / "mimo_v26_flash" / "mimo-v2.6-flash-mopd-evaluation-guide.md"
README = EVALUATION / "README.md"
#: Only looked at as words: they need a registry, a network, or a place that is not here.
WORDS_ONLY = {"docker", "pip", "curl", "export", "mkdir"}
_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=")
_REDIRECTIONS = {">", "2>&1", "&", "|"}


@dataclass(frozen=True)
class Command:
    """A line of a fenced block: variables in front, words up to the first redirection."""

    env: dict[str, str]
    words: list[str]

    @property
    def program(self) -> str:
        return self.words[0] if self.words else ""


def commands(text: str) -> list[Command]:
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```$", text, flags=re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            end = next((index for index, word in enumerate(words) if word in _REDIRECTIONS), len(words))
            words, env = words[:end], {}
            while words and _ASSIGNMENT.match(words[0]):
                name, _, value = words.pop(0).partition("=")
                env[name] = value
            if words:
                found.append(Command(env, words))
    return found


COMMANDS = commands(GUIDE.read_text())


def files_named() -> list[str]:
    """Paths below `evaluation/` in the guide's commands."""
    return sorted({word for command in COMMANDS for word in command.words if word.startswith("evaluation/")})


def of(kind: str) -> list[Command]:
    return [command for command in COMMANDS if kind_of(command) == kind]


def kind_of(command: Command) -> str:
    """How a command is checked; a command that nothing checks is an error.

    Raises:
        AssertionError: no rule for it.
    """
    program = Path(command.program).name
    if command.program.startswith("evaluation/"):
        return "launcher" if program.startswith("launch_") else "script"
    if program in WORDS_ONLY:
        return "words"
    if program == "dflash-rocm":
        return "cli"
    if program in ("python3", "python"):
        if command.words[1].startswith("evaluation/"):
            return "script"
        if command.words[1:3] == ["-m", "venv"]:
            return "words"
    raise AssertionError(f"no check for {command.words}; add one")


def test_every_command_has_a_check():
    kinds = [kind_of(command) for command in COMMANDS]
    assert {"launcher", "script", "cli", "words"} == set(kinds) and len(kinds) > 15
    with pytest.raises(AssertionError, match="no check for"):
        kind_of(Command({}, ["python3", "-m", "sglang.launch_server"]))


@pytest.mark.parametrize("name", files_named())
def test_a_file_that_the_guide_runs_exists(name):
    path = ROOT / name
    assert path.is_file(), f"{name} does not exist"
    assert path.suffix != ".sh" or os.access(path, os.X_OK), f"{name} cannot be executed"


def test_every_script_is_in_guide_and_readme():
    listed = set(re.findall(r"^\| `([\w./]+)` \|", README.read_text(), flags=re.M))
    there = {str(path.relative_to(EVALUATION)) for path in EVALUATION.rglob("*") if path.suffix in (".sh", ".py")}
    assert there <= listed
    assert {f"evaluation/{name}" for name in there} <= set(files_named())
    assert {path.removeprefix("evaluation/") for path in files_named()} <= listed


@pytest.mark.parametrize(
    "command", of("launcher"), ids=lambda command: f"{Path(command.program).name}-{len(command.env)}"
)
def test_launchers_accept_the_guides_variables(command):
    known = {variable.name for variable in settings.VARIABLES}
    assert set(command.env) <= known
    env = {name: value for name, value in os.environ.items() if name not in known and not name.startswith("SGLANG_")}
    done = subprocess.run(
        ["bash", str(ROOT / command.program)],
        env={**env, **command.env, "DRY_RUN": "1", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", of("cli"), ids=lambda command: " ".join(command.words[1:3]))
def test_dflash_rocm_knows_the_command_and_its_options(command):
    """Server flags after `--` are those of the launcher, which SGLang's own parser has seen (test_launchers.py)."""
    group = typer.main.get_command(app)
    name, words = command.words[1], command.words[2:]
    own, server_flags = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    assert name in group.commands, f"dflash-rocm has no command {name}"
    parsed = group.commands[name].make_context(name, list(own), resilient_parsing=False)
    assert not parsed.args
    assert flags(server_flags) <= flags(arguments(LAUNCHERS[0], {}))


def flags(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def test_a_wrong_option_would_be_noticed():
    plan = typer.main.get_command(app).commands["plan"]
    with pytest.raises(Exception, match="No such option"):
        plan.make_context("plan", ["--model-config", "m", "--no-such-option", "1"])


def test_the_variable_table_is_current():
    text = README.read_text()
    table = text[text.index("<!-- variables -->") : text.index("<!-- end of variables -->")].partition("\n")[2]
    assert table.strip() == settings.markdown_table(), "run `python -m sglang_dflash_rocm.evaluation.launcher_settings`"


def test_figures_from_hardware_are_marked():
    """Whoever reads one must see that it was not measured with this package."""
    text = re.sub(r"^```bash\n.*?^```$", "", GUIDE.read_text(), flags=re.M | re.S)
    figures = [part for part in text.split("\n\n") if "97.6" in part or "5.56" in part]
    assert len(figures) > 2 and all("seed" in part for part in figures)
