"""Writes the code of a fix: a factory call with device=, the argument that a move was given. Changes no file."""

from __future__ import annotations

import ast
import copy
import linecache
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from trimtab.diagnose import source
from trimtab.diagnose.finding import Edit

if TYPE_CHECKING:
    from trimtab.diagnose.scene import Scene, Suspect

_FACTORIES = frozenset(
    (
        *("ones", "zeros", "full", "empty", "eye", "arange", "linspace", "logspace", "tensor", "as_tensor"),
        *("rand", "randn", "randint", "randperm", "tril_indices", "triu_indices", "Generator"),
        *("hann_window", "hamming_window", "blackman_window", "kaiser_window", "bartlett_window"),
    )
)


def factories(node: ast.AST) -> list[ast.Call]:
    """The torch factory calls in an expression that lack `device=`."""
    return [call for call in factory_calls(node) if source.keyword(call, "device") is None]


def factory_calls(node: ast.AST) -> list[ast.Call]:
    """The torch factory calls in an expression."""
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    return [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "torch"
        and call.func.attr in _FACTORIES
    ]


def text_of(file: str, node: ast.expr | ast.stmt) -> str:
    """What stands in the file for a node, as it is written there."""
    found = ast.get_source_segment("".join(linecache.getlines(file)), node)
    return found if found is not None else ast.unparse(node)


def with_keyword(file: str, call: ast.Call, name: str, value: str) -> str:
    """A call with one keyword argument set, as code; the rest stays as it is written."""
    if source.keyword(call, name) is None and (text := text_of(file, call)).endswith(")"):
        inside = text[:-1].rstrip().removesuffix(",")
        return f"{inside}{', ' if call.args or call.keywords else ''}{name}={value})"
    changed = copy.deepcopy(call)
    changed.keywords = [k for k in changed.keywords if k.arg != name]
    changed.keywords.append(ast.keyword(name, ast.parse(value, mode="eval").body))
    return ast.unparse(changed)


def after_edits(file: str, node: ast.stmt, edits: Iterable[Edit]) -> str:
    """A statement (of a compound one the header) as it stands after its edits, on one line and without comments."""
    text = applied("".join(linecache.getlines(file)), edits)
    grown = text.count("\n") - len(linecache.getlines(file))
    body = getattr(node, "body", None)
    last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
    lines = text.splitlines()[node.lineno - 1 : last + grown]
    whole = textwrap.dedent("\n".join(lines))
    try:
        found = ast.get_source_segment(whole, ast.parse(whole).body[0])
    except SyntaxError:
        found = None
    return " ".join(line.strip() for line in (found or whole).splitlines())


def shown(edits: list[Edit]) -> str:
    """The statement in which the first of the edits stands, as it is after them."""
    statement = source.statement(edits[0].file, edits[0].start[0])
    return after_edits(edits[0].file, statement, edits) if statement is not None else edits[0].text


def each_shown(edits: list[Edit]) -> str:
    """Every statement that edits inside lines change, as it is after them."""
    lines = dict.fromkeys((edit.file, edit.start[0]) for edit in edits)
    found = [(file, source.statement(file, line)) for file, line in lines]
    texts = {}
    for file, node in found:
        if node is not None:
            texts[file, node.lineno] = after_edits(file, node, [e for e in edits if e.file == file])
    return "; ".join(f"line {line}: {text}" for (_, line), text in texts.items())


def without(file: str, node: ast.stmt) -> Edit:
    """Takes a statement that has its lines to itself out of a file."""
    return Edit(file, (node.lineno, 0), ((node.end_lineno or node.lineno) + 1, 0), "")


def has_factory(node: ast.AST) -> bool:
    """Whether an expression makes a new tensor (torch.ones(…), torch.from_numpy(…))."""
    return any(
        isinstance(n, ast.Call)
        and isinstance(n.func, ast.Attribute)
        and (
            n.func.attr in _FACTORIES
            or n.func.attr in ("from_numpy", "load")
            or n.func.attr.endswith("Tensor")
        )
        and ast.unparse(n.func.value) in ("torch", "np", "numpy")
        for n in ast.walk(node)
    )


def assigned(file: str, line: int) -> str | None:
    """What the first `.to(…)` on a line was given, as written."""
    for call in source.call_on(file, line):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "to" and call.args:
            return ast.unparse(call.args[0])
    return None


def last_move_argument(scene: Scene, stray: Suspect) -> str | None:
    """The device that the program itself asked for when it made or moved a suspect, as written."""
    lines = [(o.file, o.line) for o in (stray.moved, stray.born) if o is not None]
    lines += [(sight.file, sight.made.lineno) for sight in scene.sights(stray) if sight.made is not None]
    for file, line in lines:
        if chosen := assigned(file, line):
            return chosen
        for call in source.call_on(file, line):
            if (device := source.keyword(call, "device")) is not None:
                return ast.unparse(device)
    return None


def in_place_of(file: str, node: ast.expr | ast.stmt, text: str) -> Edit:
    """Puts `text` where an expression or statement of a file stands; what surrounds it stays as it was written."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return Edit(
        file,
        (node.lineno, _column(file, node.lineno, node.col_offset)),
        (node.end_lineno, _column(file, node.end_lineno, node.end_col_offset)),
        text,
    )


def end_of(file: str, node: ast.expr | ast.arg) -> tuple[int, int]:
    """Where an expression ends, in characters."""
    line = node.end_lineno or node.lineno
    return line, _column(file, line, node.end_col_offset or 0)


def before(file: str, node: ast.stmt, text: str) -> Edit:
    """Lines of their own before a statement, indented as the statement is."""
    indented = textwrap.indent(text, _indent(file, node.lineno))
    return Edit(file, (node.lineno, 0), (node.lineno, 0), f"{indented}\n")


def after(file: str, node: ast.stmt, text: str) -> Edit:
    """Lines of their own after a statement, indented as the statement is."""
    line = (node.end_lineno or node.lineno) + 1
    indented = textwrap.indent(text, _indent(file, node.lineno))
    return Edit(file, (line, 0), (line, 0), f"{indented}\n")


def lines_for(file: str, node: ast.stmt, text: str) -> Edit:
    """Lines of their own in a statement's place, indented as the statement is."""
    indented = textwrap.indent(text, _indent(file, node.lineno))
    return Edit(file, (node.lineno, 0), ((node.end_lineno or node.lineno) + 1, 0), f"{indented}\n")


def applied(text: str, edits: Iterable[Edit]) -> str:
    """A file's text with its edits made."""
    lines = text.splitlines(keepends=True)
    edits = list(edits)
    if lines and not lines[-1].endswith("\n") and any(edit.start[0] > len(lines) for edit in edits):
        lines[-1] += "\n"
    lines.append("")
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        (first, left), (last, right) = edit.start, edit.end
        changed = lines[first - 1][:left] + edit.text + lines[last - 1][right:]
        lines[first - 1 : last] = [changed]
    return "".join(lines)


def _column(file: str, line: int, offset: int) -> int:
    """From ast's offset in bytes to one in characters."""
    return len(linecache.getline(file, line).encode()[:offset].decode())


def _indent(file: str, line: int) -> str:
    text = linecache.getline(file, line)
    return text[: len(text) - len(text.lstrip())]


def add_keyword(file: str, call: ast.Call, name: str, value: str) -> Edit:
    """Gives a call a keyword argument: in place of the one of that name, else behind those that it has."""
    if (said := source.keyword(call, name)) is not None:
        return in_place_of(file, said, value)
    given: list[ast.expr] = sorted(
        (*call.args, *(k.value for k in call.keywords)),
        key=lambda node: (node.end_lineno, node.end_col_offset),
    )
    if given:
        line, offset = given[-1].end_lineno or 0, given[-1].end_col_offset or 0
        end = (line, _column(file, line, offset))
        # A generator that is the only argument needs brackets then, and a value may stand in brackets of its own.
        if isinstance(given[-1], ast.GeneratorExp) or _bracketed(file, call, end):
            changed = copy.deepcopy(call)
            changed.keywords.append(ast.keyword(name, ast.parse(value, mode="eval").body))
            return in_place_of(file, call, ast.unparse(changed))
        return Edit(file, end, end, f", {name}={value}")
    line = call.end_lineno or call.lineno
    column = _column(file, line, call.end_col_offset or 0) - 1
    return Edit(file, (line, column), (line, column), f"{name}={value}")


def _bracketed(file: str, call: ast.Call, end: tuple[int, int]) -> bool:
    """Whether, on the call's last line, more than its own bracket closes behind the last argument."""
    last = (call.end_lineno or 0, _column(file, call.end_lineno or 0, call.end_col_offset or 0))
    return end[0] == last[0] and linecache.getline(file, end[0])[end[1] : last[1]].count(")") > 1


def operand(node: ast.expr) -> str:
    """An expression as it has to be written as a part of another one: in brackets where it needs them."""
    plain = isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Call | ast.Constant)
    return ast.unparse(node) if plain else f"({ast.unparse(node)})"


def moved(file: str, node: ast.stmt, behind: ast.stmt) -> list[Edit]:
    """Takes a statement away and puts it behind a later one of the same block, as it was written."""
    end = (node.end_lineno or node.lineno) + 1
    text = "".join(linecache.getline(file, line) for line in range(node.lineno, end))
    line = (behind.end_lineno or behind.lineno) + 1
    return [Edit(file, (node.lineno, 0), (end, 0), ""), Edit(file, (line, 0), (line, 0), text)]


def written(file: str, node: ast.stmt) -> str:
    """A statement as it is written, its further lines moved left by its own indentation."""
    first, last = node.lineno, node.end_lineno or node.lineno
    indent = len(_indent(file, first))
    texts = [linecache.getline(file, line) for line in range(first, last + 1)]
    return "".join(text[min(indent, len(text) - len(text.lstrip())) :] for text in texts).rstrip("\n")
