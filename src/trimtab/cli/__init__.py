"""The door: one file per verb. Each parses, calls, prints and ends with an exit code; none imports torch early.

Exit codes of all verbs: 0 fine, 1 a fault was found or the run failed, 2 the request itself is wrong, 3 could not
tell.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from trimtab import __version__
from trimtab.cli.bench import bench
from trimtab.cli.config_schema import config_schema
from trimtab.cli.doctor import doctor
from trimtab.cli.explain import explain
from trimtab.cli.export import export
from trimtab.cli.plan import plan
from trimtab.cli.rehearse import CONTEXT as REHEARSE_CONTEXT
from trimtab.cli.rehearse import rehearse
from trimtab.cli.replay import replay
from trimtab.cli.report import report
from trimtab.cli.train import train
from trimtab.errors import TrimtabError

app = typer.Typer(
    name="trimtab",
    help="Fine-tune language models with one plan for every tensor.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"trimtab {__version__}")
        raise typer.Exit


app.command()(train)
app.command()(plan)
app.command(context_settings=REHEARSE_CONTEXT)(rehearse)
app.command()(explain)
app.command()(export)
app.command()(replay)
app.command()(report)
app.add_typer(bench)
app.command()(doctor)
app.command("config-schema")(config_schema)


def main() -> None:
    """Run the verb; an error that was foreseen becomes a message and its exit code, never a traceback."""
    try:
        app()
    except TrimtabError as error:
        from trimtab.config.problems import without_secrets

        print(f"error: {without_secrets(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
