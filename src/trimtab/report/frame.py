"""What all pages share: the frame with its style, and small pieces of HTML. It never reads a run.

Every text goes through `text`; a page holds no script but ours, and nothing from the network.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trimtab import __version__
from trimtab.report import inlined

GENERATOR = '<meta name="generator" content="trimtab">'
"""By this a file is known as a page of ours, which may be replaced."""

LONGEST_TEXT = 4000
LONGEST_NAME = 300
"""Of a module or a tensor."""
# What HTML cannot hold, and the two marks that turn letters around: a line would read otherwise than it runs.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202d\u202e\ud800-\udfff]")

_QUOTED = re.compile(r"`([^`\n]{1,300})`")
_FIGURE = re.compile(r"[-+−]?[\d.,]+(?:e[-+]?\d+)?\W?(?:[KMGT]iB|B|m?s|min|%)?|[–0]")
"""A cell that is a number alone, with its unit; or none."""


def page(title: str, parts: Iterable[str]) -> str:
    """The whole page around its parts; empty parts are left out."""
    body = "\n".join(part for part in parts if part)
    whole = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"{GENERATOR}{inlined.policy(body)}<title>{text(title)}</title>{inlined.style(body)}</head><body>",
        body,
        f'<footer class="note">Made by Trimtab {text(__version__)}.</footer>',
        inlined.scripts(body),
        "</body></html>",
    ]
    return "\n".join(whole) + "\n"


def text(value: object) -> str:
    """Anything as text that no browser takes for markup."""
    return html.escape(printable(value), quote=True)


def printable(value: object) -> str:
    """Anything as text that can be shown; a character that cannot shows as an unknown one."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(value))


def prose(value: object) -> str:
    """`text` of a sentence in which what stands between backquotes is code."""
    return _QUOTED.sub(r"<code>\1</code>", text(value))


def note(value: object) -> str:
    """A remark beside the figures, set small."""
    return f'<p class="note">{prose(value)}</p>'


def said(value: object) -> str:
    """What a model or a person said, in a box that does not grow without end."""
    shown = cut(value) if str(value).strip() else "<em>(empty)</em>"
    return f'<div class="said">{shown}</div>'


def cut(value: object, most: int = LONGEST_TEXT, shown: Callable[[object], str] = text) -> str:
    """`text` (or `prose`), cut when it is very long; how much is gone stands behind it."""
    whole = str(value)
    if len(whole) <= most:
        return shown(whole)
    return f"{shown(whole[:most])} <em>… {len(whole) - most:,} more characters</em>"


def section(title: str, parts: Iterable[str], *, name: str = "", kind: str = "") -> str:
    """A titled box, or nothing where there is nothing in it. `name` is what the page's own links point at."""
    inside = [part for part in parts if part]
    if not inside:
        return ""
    marks = (f' id="{text(name)}"' if name else "") + (f' class="{text(kind)}"' if kind else "")
    return "\n".join([f"<section{marks}><h2>{text(title)}</h2>", *inside, "</section>"])


def folded(title: str, inside: str, *, opened: bool = False) -> str:
    """A part that is opened by a click; needs no script."""
    return f"<details{' open' * opened}><summary>{text(title)}</summary>\n{inside}\n</details>"


def table(head: Sequence[object], rows: Iterable[Sequence[object]], *, cards: bool = False) -> str:
    """A table of texts."""
    return raw_table(head, ([text(cell) for cell in row] for row in rows), cards=cards)


def raw_table(head: Sequence[object], rows: Iterable[Sequence[str]], *, cards: bool = False) -> str:
    """A table whose cells are HTML already; nothing where it has no row. Where it is too wide it scrolls by itself.

    With `cards` each row becomes a block of its own on a narrow screen, with its names beside its cells.
    """
    listed = [list(row) for row in rows]
    if not listed:
        return ""
    columns = zip(*listed, strict=True)
    # Figures stand under one another by their last digits.
    right = [' class="figure"' if all(map(_FIGURE.fullmatch, column)) else "" for column in columns]
    named = [f' data-name="{text(name)}"' if cards else "" for name in head]
    marks = [kind + name for kind, name in zip(right, named, strict=True)]
    lines = []
    for row in listed:
        whole = (f"<div>{cell}</div>" if cards else cell for cell in row)
        cells = (f"<td{mark}>{cell}</td>" for mark, cell in zip(marks, whole, strict=True))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    heads = (f'<th scope="col"{kind}>{text(name)}</th>' for kind, name in zip(right, head, strict=True))
    first = f"<tr>{''.join(heads)}</tr>"
    kind = ' class="cards"' if cards else ""
    return "\n".join([f'<div class="scroll"><table{kind}>', first, *lines, "</table></div>"])


def facts(values: Mapping[str, Any], *, wide: bool = False) -> str:
    """Names with their values; what is empty is left out, and what has parts is told in one line.

    `wide` sets short ones side by side.
    """
    told = {name: plain(value) for name, value in values.items()}
    return raw_facts([(name, text(value)) for name, value in told.items()], wide=wide)


def raw_facts(values: Iterable[tuple[str, str]], *, wide: bool = False) -> str:
    """`facts` whose values are HTML already."""
    pairs = [f"<dt>{text(name)}</dt><dd>{value}</dd>" for name, value in values if value]
    if wide and pairs:
        return f'<dl class="wide"><div>{"</div><div>".join(pairs)}</div></dl>'
    return f"<dl>{''.join(pairs)}</dl>" if pairs else ""


def plain(value: Any) -> str:
    """A value of a JSON file as a person reads it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(plain(entry) for entry in value)
    return str(value)
