"""``dflash-rocm``: one command per module. Modules keep heavy imports inside their functions, so that help is quick."""

from __future__ import annotations

import typer

from sglang_dflash_rocm.cli.check import check
from sglang_dflash_rocm.cli.demo import demo
from sglang_dflash_rocm.cli.fingerprints import fingerprints
from sglang_dflash_rocm.cli.plan import plan
from sglang_dflash_rocm.cli.report import report

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="DFlash with DP attention for MiMo-V2.6-Flash on gfx942, as a plugin of released SGLang.",
)

app.command()(demo)
# Everything after `--` belongs to the server and is only looked at.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(check)
app.command()(fingerprints)
app.command()(plan)
app.command()(report)

if __name__ == "__main__":
    app()
