"""What to write where data or parameters can be gone through once only. Reads source, runs nothing."""

from __future__ import annotations

import ast

from trimtab.diagnose import rewrite, source, trace
from trimtab.diagnose.finding import Edit, Place


def kept_as_list(place: Place, node: ast.expr) -> tuple[Place | None, str, list[Edit]]:
    """Of an iterator that an expression on a line stands for: where it was made, and how it is kept as a list."""
    made, value = trace.decided(place.file, place.line, node)
    if value is node and isinstance(node, ast.Name | ast.Attribute):
        return None, f"Make {ast.unparse(node)} a list where it is made: list(...).", []
    if isinstance(value, ast.Call) and source.called_name(value) == "iter" and len(value.args) == 1:
        code = ast.unparse(value.args[0])
        return (
            made,
            f"Go over it anew each time: {code}, without iter().",
            [rewrite.in_place_of(made.file, value, code)],
        )
    if isinstance(value, ast.GeneratorExp):
        text = rewrite.text_of(made.file, value)
        code = f"[{text[1:-1]}]" if text.startswith("(") else f"[{text}]"
    else:
        code = f"list({rewrite.text_of(made.file, value)})"
    return made, f"Keep it as a list: {code}.", [rewrite.in_place_of(made.file, value, code)]
