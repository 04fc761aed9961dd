"""`trimtab explain`: reads a traceback or a log, says cause and fix. Runs nothing and needs no torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trimtab.diagnose.explain import Explanation

_MOST = 16 << 20
"""Bytes of a log; what is longer is no traceback that somebody pasted."""


def explain(
    file: Annotated[
        str, typer.Argument(help="A file with a traceback or log; - reads standard input.")
    ] = "-",
    as_json: Annotated[bool, typer.Option("--json", help="Print the explanations as JSON.")] = False,
) -> None:
    """Say cause and fix of the errors in a pasted traceback or log; exit code 3 when none of them is known."""
    from trimtab.diagnose.explain import explain as explain_text
    from trimtab.diagnose.explain import last_error

    text = _read(file)
    explanations = explain_text(text)
    if as_json:
        typer.echo(json.dumps([e.to_dict() for e in explanations], indent=2, ensure_ascii=False))
    elif explanations:
        typer.echo("\n\n".join(_block(explanation) for explanation in explanations))
    else:
        typer.echo("I don't know this one.")
        if last := last_error(text):
            line, where = last
            typer.echo(f"  last error  {line}")
            if where:
                typer.echo(f"  your line   {where.file}:{where.line}  {where.code}")
        else:
            typer.echo("  There is no error text in it that I could find; paste the whole traceback.")
    if not explanations:
        raise typer.Exit(3)


def _block(explanation: Explanation) -> str:
    lines = [f"{explanation.kind}  (line {explanation.line_number})", f"  {explanation.quote}"]
    if explanation.where:
        where = explanation.where
        lines.append(f"  your line  {where.file}:{where.line}  {where.code}".rstrip())
    lines.append(f"  cause      {explanation.cause}")
    lines.append(f"  fix        {explanation.fix}")
    return "\n".join(lines)


def _read(file: str) -> str:
    from trimtab.errors import RequestError
    from trimtab.reading import read_bytes

    if file == "-":
        return sys.stdin.buffer.read(_MOST).decode("utf-8", errors="replace")
    try:
        return read_bytes(Path(file), _MOST).decode("utf-8", errors="replace")
    except (OSError, ValueError) as error:
        raise RequestError.of(
            f"cannot read {file}: {getattr(error, 'strerror', None) or error}",
            "explain reads a traceback or log from a file",
            "give a path that exists, or - and paste the text to standard input",
        ) from error
