"""The door: one file per verb. Each parses, calls, prints and ends with an exit code; none imports torch early.

Exit codes of all verbs: 0 fine, 1 a fault was found or the run failed, 2 the request itself is wrong, 3 could not
tell.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import nullcontext
from typing import Annotated, NoReturn

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
from trimtab.cli.faults import hiding, take_debug_flag, tell, told
from trimtab.cli.fit import fit
from trimtab.cli.plan import plan
from trimtab.cli.rehearse import CONTEXT as REHEARSE_CONTEXT
from trimtab.cli.rehearse import rehearse
from trimtab.cli.replay import replay
from trimtab.cli.report import report
from trimtab.cli.speak import speak
from trimtab.cli.streams import steady_streams
from trimtab.cli.told_to_end import heard
from trimtab.cli.train import train
from trimtab.errors import NoRoomError, RequestError, TrimtabError
from trimtab.shortage import refusals_told
from trimtab.start_up import collector_held, roomy

_INTERRUPTED = 130
"""What typer ends with after Ctrl-C."""
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
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (as TRIMTAB_DEBUG=1 does).")
    ] = False,
) -> None:
    del debug  # taken off before, so that it may stand after the verb as well
    if version:
        typer.echo(f"trimtab {__version__}")
        raise typer.Exit


app.command(cls=SettingsCommand)(train)
app.command(cls=SettingsCommand)(plan)
app.command(cls=SettingsCommand)(fit)
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


@roomy
def main() -> None:
    """Run the verb; an error becomes a message and an exit code. The traceback is shown on request (`--debug`).

    No secret is shown in either.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # Where the console's or the file's encoding has no ✓, a question mark stands in its place.
        sys.stdout.reconfigure(errors="replace")
    words = take_debug_flag(sys.argv[1:])
    if _rehearsed():
        _main(words)
        return
    with collector_held(), steady_streams() as output, heard() as signals:
        try:
            _main(words)
        except KeyboardInterrupt:
            _tell_signal(signals)
        except SystemExit as end:
            if end.code == _INTERRUPTED:
                _tell_signal(signals)
            if end.code:
                raise
        sys.stdout.flush()
        if output is not None and output.failed is not None and words[:1] != ["train"]:
            sys.exit(1)  # what was asked for did not arrive; a run is kept in its folder
        sys.exit(0)


def _tell_signal(signals: list[str]) -> NoReturn:
    print(f"stopped by {signals[-1] if signals else 'SIGINT'}, before it was done", file=sys.stderr)
    sys.exit(1)


def _main(words: list[str]) -> None:
    try:
        with nullcontext() if _rehearsed() else refusals_told():
            app(args=words)
    except TrimtabError as error:
        if not _told_by_the_rehearsal(error):
            tell(error, str(error))
        sys.exit(error.exit_code)
    except Exception as error:
        if _rehearsed():
            # Raised again, not told here: a rehearsal of this very command looks for the error itself.
            sys.excepthook = hiding(sys.excepthook)
            raise
        tell(error, told(error))
        sys.exit(1)


def _told_by_the_rehearsal(error: TrimtabError) -> bool:
    """Whether this is a rehearsed run, and `rehearse` itself ends with this message."""
    refused = isinstance(error, RequestError) and not isinstance(error, NoRoomError)
    return refused and _rehearsed()


def _rehearsed() -> bool:
    from trimtab.rehearse.session import VARIABLE

    return VARIABLE in os.environ
