"""How a kept state becomes a copy, a load comes last and a tie is tied again. Reads source only."""

from __future__ import annotations

import ast

from trimtab.diagnose import mends_graph, mends_layers, rewrite, source
from trimtab.diagnose.finding import Edit, Place


def copied(taken: Place) -> tuple[str, list[Edit]]:
    """A state_dict() of which the tensors are copied."""
    for call in source.call_on(taken.file, taken.line):
        if source.called_name(call) == "state_dict":
            code = f"{{k: v.detach().clone() for k, v in {rewrite.text_of(taken.file, call)}.items()}}"
            return f"Keep a copy: {code}.", [rewrite.in_place_of(taken.file, call, code)]
    return "Keep a copy: copy.deepcopy(model.state_dict()).", []


def one_module(place: Place) -> tuple[Place, str, str] | None:
    """Of a line that loads one name's state into another: the line that made the two names one module."""
    for call in (
        c for c in source.call_on(place.file, place.line) if source.called_name(c) == "load_state_dict"
    ):
        state = call.args[0] if call.args else None
        plain = isinstance(state, ast.Call) and source.called_name(state) == "state_dict"
        if not plain or not isinstance(state, ast.Call) or not isinstance(state.func, ast.Attribute):
            continue
        one = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        other = ast.unparse(state.func.value)
        made = [n for n in source.walk(place.file) if isinstance(n, ast.Assign) and one != other]
        named = [n for n in made if isinstance(n.value, ast.Name | ast.Attribute)]
        for name in (one, other):
            for node in (n for n in named if ast.unparse(n.targets[0]) == name):
                fix = f"Make a copy: {name} = copy.deepcopy({ast.unparse(node.value)}) (import copy)."
                return source.place(place.file, node.lineno), f"{one} and {other}", fix
    return None


def drawn_before(load: Place, lines: list[Place]) -> tuple[Place, str, list[Edit]]:
    """The line, in the function that loads, that draws weights: put before the load, or taken out."""
    function = source.function_at(load.file, load.line)
    here = [p for p in lines if p.file == load.file and source.function_at(p.file, p.line) is function]
    draw = here[0] if here else lines[-1]
    drawing, loading = source.statement(draw.file, draw.line), source.statement(load.file, load.line)
    said = f"Draw them before the load: put {draw.code} before line {load.line} ({load.code})."
    if drawing is None or loading is None or not here:
        behind = mends_layers.late_deed(load, draw)
        return behind, said, mends_graph.move_behind(load.file, load, behind)
    edits = mends_graph.move_behind(load.file, load, draw) if isinstance(drawing, ast.Expr) else []
    return draw, said, edits


def tied_again(place: Place, names: list[str]) -> tuple[str, list[Edit]]:
    """The tie made once more behind the line that broke it, in the words of that line."""
    node = source.statement(place.file, place.line)
    calls = [c for c in source.call_on(place.file, place.line) if isinstance(c.func, ast.Attribute)]
    whole = next((ast.unparse(c.func.value) for c in calls if isinstance(c.func, ast.Attribute)), "model")
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        whole = ast.unparse(node.targets[0])
    code = f"{_inside(whole, names[-1])} = {_inside(whole, names[0])}"
    plain = (
        isinstance(node, ast.Expr | ast.Assign) and node is not None and whole.replace(".", "").isidentifier()
    )
    return f"Tie them again behind it: {code}.", [
        rewrite.after(place.file, node, code)
    ] if plain and node else []


def _inside(whole: str, name: str) -> str:
    """A parameter by its name in a module, as code: the layers of a list or sequence by their number."""
    return whole + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in name.split("."))
