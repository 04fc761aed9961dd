"""What all pages share: the frame with its style, and small pieces of HTML. It never reads a run.

Every text goes through `text`; a page holds no script and nothing from the network.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trimtab import __version__

GENERATOR = '<meta name="generator" content="trimtab">'
"""By this a file is known as a page of ours, which may be replaced."""

LONGEST_TEXT = 4000
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --fault: #c62828; --warning: #b26a00; --clean: #2e7d32; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 0; } h3 { font-size: 1rem; margin: 1rem 0 .3rem; }
section { border: 1px solid var(--line); border-left-width: .4rem; border-radius: .3rem; margin: 1rem 0;
  padding: .8rem 1rem; overflow-x: auto; }
.fault { border-left-color: var(--fault); } .warning, .unproven { border-left-color: var(--warning); }
.clean { border-left-color: var(--clean); }
dl { display: grid; grid-template-columns: minmax(5rem, max-content) 1fr; gap: .3rem 1rem; margin: .6rem 0 0; }
dl.wide { grid-template-columns: repeat(auto-fill, minmax(14rem, 1fr)); }
dl.wide > div { display: flex; flex-wrap: wrap; gap: 0 .6rem; }
dt { opacity: .75; } dd { margin: 0; overflow-wrap: anywhere; white-space: pre-wrap; }
code, pre { font: .9em ui-monospace, monospace; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; margin: .3rem 0; }
table { border-collapse: collapse; margin: .5rem 0; }
td { font-variant-numeric: tabular-nums; }
td, th { border-bottom: 1px solid var(--line); padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
p { margin: .5rem 0; } .note { opacity: .75; font-size: .9rem; } summary { cursor: pointer; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; } nav a { color: inherit; }
.said { white-space: pre-wrap; overflow: auto; max-height: 18rem; overflow-wrap: anywhere; min-width: 8rem; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { opacity: .75; font-size: .85rem; }
.voice { border-top: 1px solid var(--line); margin: .8rem 0 0; padding: .6rem 0 0; }
.voice > .said { font-size: 1.05rem; } .voice > .note { margin: .1rem 0 .5rem; }
.clips { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(18rem, 100%), 1fr)); gap: 1rem 1.2rem; }
.clips figure { display: grid; grid-template-columns: 3rem 1fr; grid-auto-rows: min-content; }
.clips figcaption, .clips audio, .clips .note { grid-column: 1 / 3; opacity: 1; }
.clips figcaption { margin-bottom: .3rem; min-height: 3em; } .clips audio { width: 100%; height: 2.2rem; }
.drawn { background: #8883; height: 8rem; } .drawn img { display: block; height: 100%; border-radius: 2px; }
.pitch, .time { position: relative; font-size: .65rem; line-height: 1; opacity: .75; }
.pitch span { position: absolute; right: .35rem; transform: translateY(50%); white-space: nowrap; }
.time { grid-column: 2; height: 1.3rem; } .time span { position: absolute; top: .25rem; white-space: nowrap; }
.time span:not(:first-child) { transform: translateX(-50%); }
td img { display: block; max-width: 16rem; height: auto; margin: .2rem 0; }
svg { max-width: 100%; height: auto; } svg text { fill: currentColor; } svg > rect { fill: none; }
svg line[stroke="#ddd"] { stroke: var(--line); }
@media (prefers-color-scheme: dark) {
  :root { --fault: #ef5350; --warning: #ffa726; --clean: #66bb6a; }
  svg g > :not(text) { filter: brightness(1.7); }
}
"""


def page(title: str, parts: Iterable[str]) -> str:
    """The whole page around its parts; empty parts are left out."""
    whole = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"{GENERATOR}<title>{text(title)}</title><style>{_STYLE}</style></head><body>",
        *(part for part in parts if part),
        f'<footer class="note">Made by Trimtab {text(__version__)}.</footer>',
        "</body></html>",
    ]
    return "\n".join(whole) + "\n"


def text(value: object) -> str:
    """Anything as text that no browser takes for markup; a character that HTML cannot hold shows as an unknown one."""
    return html.escape(_UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(value)), quote=True)


def note(value: object) -> str:
    """A remark beside the figures, set small."""
    return f'<p class="note">{text(value)}</p>'


def said(value: object) -> str:
    """What a model or a person said, in a box that does not grow without end."""
    return f'<div class="said">{cut(value)}</div>'


def cut(value: object) -> str:
    """`text`, cut when it is very long; how much is gone stands behind it."""
    whole = str(value)
    if len(whole) <= LONGEST_TEXT:
        return text(whole)
    return f"{text(whole[:LONGEST_TEXT])} <em>… {len(whole) - LONGEST_TEXT:,} more characters</em>"


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


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table of texts."""
    return raw_table(head, ([text(cell) for cell in row] for row in rows))


def raw_table(head: Sequence[object], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells are HTML already; nothing where it has no row."""
    lines = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    if not lines:
        return ""
    first = "<tr>" + "".join(f'<th scope="col">{text(name)}</th>' for name in head) + "</tr>"
    return "\n".join(["<table>", first, *lines, "</table>"])


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


def drawing(svg: str, label: str, caption: str = "") -> str:
    """An SVG document of ours inside the page. HTML knows what an svg is without its namespace."""
    named = svg.replace("xmlns='http://www.w3.org/2000/svg'", f"role='img' aria-label='{text(label)}'", 1)
    told = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
    return f"<figure>{named}{told}</figure>"
