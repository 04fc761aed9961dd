"""The door: one file per verb. Each parses, calls, prints and ends with an exit code; none imports torch early.

Exit codes of all verbs: 0 fine, 1 a fault was found or the run failed, 2 the request itself is wrong, 3 could not
tell.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from trimtab import __version__
from trimtab.cli.arguments import SettingsCommand
from trimtab.cli.ask import ask
from trimtab.cli.bench import bench
from trimtab.cli.config_schema import config_schema
from trimtab.cli.doctor import doctor
from trimtab.cli.evaluate import evaluate
from trimtab.cli.explain import explain
from trimtab.cli.export import export
from trimtab.cli.plan import plan
from trimtab.cli.rehearse import CONTEXT as REHEARSE_CONTEXT
from trimtab.cli.rehearse import rehearse
from trimtab.cli.replay import replay
from trimtab.cli.report import report
from trimtab.cli.speak import speak
from trimtab.cli.train import train
from trimtab.errors import NoRoomError, RequestError, TrimtabError
from trimtab.redaction import without_secrets
from trimtab.shortage import refusals_told

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


app.command(cls=SettingsCommand)(train)
app.command(cls=SettingsCommand)(plan)
app.command(context_settings=REHEARSE_CONTEXT)(rehearse)
app.command()(explain)
app.command()(ask)
app.command()(evaluate)
app.command()(export)
app.command()(replay)
app.command()(report)
app.command()(speak)
app.add_typer(bench)
app.command()(doctor)
app.command("config-schema")(config_schema)


def main() -> None:
    """Run the verb; an error that was foreseen becomes a message and its exit code, never a traceback.

    Any other keeps its traceback. No secret is shown in either.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # Where the console's or the file's encoding has no ✓, a question mark stands in its place.
        sys.stdout.reconfigure(errors="replace")
    try:
        with refusals_told():
            app()
    except TrimtabError as error:
        if not _told_by_the_rehearsal(error):
            print(f"error: {without_secrets(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception:
        # Raised again, not printed here: a rehearsal of this very command looks for the error itself.
        sys.excepthook = _hiding(sys.excepthook)
        raise


def _told_by_the_rehearsal(error: TrimtabError) -> bool:
    """Whether this is a rehearsed run, and `rehearse` itself ends with this message."""
    from trimtab.rehearse.session import VARIABLE

    refused = isinstance(error, RequestError) and not isinstance(error, NoRoomError)
    return refused and VARIABLE in os.environ


def _hiding(hook: Callable[..., Any]) -> Callable[..., None]:
    """The same hook for uncaught errors; what it prints is searched for secrets first."""

    def hide(*error: Any) -> None:
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            hook(*error)
        print(without_secrets(printed.getvalue()), end="", file=sys.stderr)

    return hide
