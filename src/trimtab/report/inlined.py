"""What a page carries inside it: its style, the charting library and the script that draws with it.

A page may run these scripts and no others: its policy names them by their sums, and permits no request to anywhere.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

CHART = '<figure class="chart">'
"""How a figure begins that a script draws; a page without one carries no script."""
_LIBRARY = "vendor/uPlot.iife.min.js"
_OURS = ("assets/chart_pens.js", "assets/chart_drawing.js", "assets/chart_reading.js")
_POLICY = (
    "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'"
)


@cache
def _file(name: str) -> str:
    return files("trimtab.report").joinpath(*name.split("/")).read_text(encoding="utf-8")


def script_texts() -> tuple[str, str]:
    """The library as it was released, and our parts as one script that leaves no name behind."""
    parts = "\n".join(map(_file, _OURS))
    return _file(_LIBRARY), f'(() => {{\n"use strict";\n{parts}}})();\n'


def style(body: str) -> str:
    """The style of a page with this body."""
    names = ["assets/page.css", *(["vendor/uPlot.min.css", "assets/charts.css"] if CHART in body else [])]
    return f"<style>{''.join(map(_file, names))}</style>"


def policy(body: str) -> str:
    """What a browser permits the page: nothing from elsewhere, and no script but ours."""
    sums = [f"'sha256-{_sum(script)}'" for script in script_texts()] if CHART in body else ["'none'"]
    return f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}; script-src {" ".join(sums)}">'


def scripts(body: str) -> str:
    """The scripts of a page with this body, behind the licence of what is not ours."""
    if CHART not in body:
        return ""
    licence = f"<!-- The first script is uPlot.\n{_file('vendor/LICENSE')}-->"
    return "\n".join([licence, *(f"<script>{script}</script>" for script in script_texts())])


def _sum(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
