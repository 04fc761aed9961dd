"""Where a program says how many rows it takes at once: numbers in its own source and on its own line.

Of use where no DataLoader makes its batches. It reads and changes text; whether a change does what it says, a rehearsal
shows. Never imports torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

_NAME = re.compile(r"(?:.*_)?(?:batch|batch_?size|bs|bsz|mbs)", re.IGNORECASE)
_LONE = "B"
_OPTION = re.compile(r"--?(?P<name>[A-Za-z][\w.-]*)(?:=(?P<number>\d+))?")
_DRAWN = "randint"
"""What is drawn so is rows of tokens or labels, never weights."""
_FILLED = frozenset({"randn", "rand", "ones", "zeros", "empty", "full"})


@dataclass
class Fewer:
    """A program that takes fewer rows at once."""

    words: list[str]
    """The line that starts it."""
    texts: dict[str, str] = field(default_factory=dict)
    """Its changed files, whole, by their real path."""
    changes: list[str] = field(default_factory=list)
    """What was changed, in words."""


@dataclass(frozen=True)
class _Number:
    node: ast.Constant
    name: str

    @property
    def rows(self) -> int:
        assert isinstance(self.node.value, int)
        return self.node.value


def fewer_rows(words: list[str], files: Iterable[str], divisor: int) -> Fewer | None:
    """The program with every number of rows divided, rounded down to whole rows; None where it names none."""
    found, files = Fewer(list(words)), list(files)
    trees = [_parsed(Path(file).read_bytes()) for file in files]
    drawn = {name for tree in trees if tree is not None for name in _drawn_by(tree)}
    _on_the_line(found, divisor, drawn)
    for file in files:
        _in_source(found, file, divisor, drawn)
    return found if found.changes else None


def program_files(words: list[str], *others: str) -> list[str]:
    """The script of a line, `others`, and what they import that lies beside them."""
    scripts = [word for word in words if word.endswith(".py") and Path(word).is_file()][:1]
    found: dict[str, None] = {}
    waiting = [*scripts, *others]
    while waiting:
        path = Path(waiting.pop(0)).resolve()
        if str(path) in found or not path.is_file():
            continue
        found[str(path)] = None
        waiting += [str(one) for name in _imported(path) if (one := path.parent / f"{name}.py").is_file()]
    return list(found)


def _on_the_line(found: Fewer, divisor: int, drawn: set[str]) -> None:
    """`--batch-size 16`, `--batch_size=16`, `training.batch_size=16`."""
    script = next((at for at, word in enumerate(found.words) if word.endswith(".py")), -1)
    for at in range(script + 1, len(found.words)):
        option = _OPTION.fullmatch(found.words[at])
        if option is None or not _tells_rows(option["name"].replace("-", "_").rpartition(".")[2], drawn):
            continue
        after = found.words[at + 1] if at + 1 < len(found.words) else ""
        given = option["number"] or (after if after.isdecimal() else "")
        if not given or (fewer := _divided(int(given), divisor)) is None:
            continue
        if option["number"]:
            found.words[at] = f"{found.words[at].partition('=')[0]}={fewer}"
        else:
            found.words[at + 1] = str(fewer)
        found.changes.append(f"--{option['name']} {fewer} for {given}")


def _in_source(found: Fewer, file: str, divisor: int, drawn: set[str]) -> None:
    source = Path(file).read_bytes()
    tree = _parsed(source)
    if tree is None:
        return
    lines = source.splitlines(keepends=True)
    numbers = {(one.node.lineno, one.node.col_offset): one for one in _numbers(tree, drawn)}
    # From the end on: what stands before stays where it is.
    told = []
    for (line, column), number in sorted(numbers.items(), reverse=True):
        fewer = _divided(number.rows, divisor)
        if fewer is None or number.node.end_lineno != line or number.node.end_col_offset is None:
            continue
        old = lines[line - 1]
        lines[line - 1] = old[:column] + str(fewer).encode() + old[number.node.end_col_offset :]
        told.append(f"{number.name} {fewer} for {number.rows} ({Path(file).name}:{line})")
    if told:
        found.texts[file] = b"".join(lines).decode()
        found.changes += reversed(told)


def _divided(rows: int, divisor: int) -> int | None:
    return rows // divisor if rows >= divisor else None


def _tells_rows(name: str, drawn: set[str]) -> bool:
    return name == _LONE or name in drawn or _NAME.fullmatch(name) is not None


def _drawn_by(tree: ast.Module) -> Iterator[str]:
    """The names by which rows of tokens are drawn, `randint(0, words, (args.rows, length))`; a letter is any number."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or _called(call) != _DRAWN:
            continue
        size = _size(call)
        if isinstance(size, ast.Tuple | ast.List) and len(size.elts) > 1:
            first = size.elts[0]
            name = first.attr if isinstance(first, ast.Attribute) else getattr(first, "id", "")
            yield from [name] if len(name) > 1 else []


def _numbers(tree: ast.Module, names: set[str]) -> Iterator[_Number]:
    """Whole numbers that a name, a keyword, an option or a key calls so; then the first sizes of what is drawn."""
    for node in ast.walk(tree):
        for name, value in _named(node):
            if _tells_rows(name, names) and isinstance(value, ast.Constant) and type(value.value) is int:
                yield _Number(value, name)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    drawn = [one for call in calls if _called(call) == _DRAWN and (one := _first_size(call)) is not None]
    yield from drawn
    rows = {one.rows for one in drawn}
    for call in calls:
        if _called(call) in _FILLED and (one := _first_size(call)) is not None and one.rows in rows:
            yield one


def _named(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _bound(target, value)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield from _bound(target, value)
        case ast.keyword(arg=str() as name, value=value):
            yield name, value
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, value
        case ast.arguments():
            plain = [*node.posonlyargs, *node.args]
            yield from (
                (one.arg, value) for one, value in zip(reversed(plain), reversed(node.defaults), strict=False)
            )
            yield from (
                (one.arg, value)
                for one, value in zip(node.kwonlyargs, node.kw_defaults, strict=True)
                if value is not None
            )
        case ast.Call(args=[ast.Constant(value=str() as option), *_]) if _called(node) in (
            "add_argument",
            "option",
        ):
            default = next((one.value for one in node.keywords if one.arg == "default"), None)
            if default is not None:
                yield option.lstrip("-").replace("-", "_"), default


def _bound(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, part in zip(target.elts, value.elts, strict=False):
            yield from _bound(one, part)
    elif isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Attribute):
        yield target.attr, value


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _first_size(call: ast.Call) -> _Number | None:
    """The number of rows in the size that a factory is called with."""
    size = _size(call)
    first: ast.expr | None
    if isinstance(size, ast.Tuple | ast.List):
        first = size.elts[0] if size.elts else None
    else:
        # torch.randn(16, 3, 224, 224); a lone number is a vector's length.
        first = call.args[0] if _called(call) != _DRAWN and len(call.args) > 1 else None
    if isinstance(first, ast.Constant) and type(first.value) is int:
        return _Number(first, f"{_called(call)}'s rows")
    return None


def _size(call: ast.Call) -> ast.expr | None:
    """The size that a factory is called with, where it is one argument."""
    size = next((one.value for one in call.keywords if one.arg == "size"), None)
    tuples = [one for one in call.args if isinstance(one, ast.Tuple | ast.List)]
    return size if size is not None else tuples[0] if tuples else None


def _imported(path: Path) -> Iterator[str]:
    tree = _parsed(path.read_bytes())
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if "." not in one.name)
        elif isinstance(node, ast.ImportFrom) and node.module and "." not in node.module:
            yield node.module


def _parsed(source: bytes) -> ast.Module | None:
    """None of what is no Python, or not in UTF-8: a changed text is handed on in it, and places are counted in it."""
    try:
        return ast.parse(source.decode())
    except (SyntaxError, ValueError):
        return None
