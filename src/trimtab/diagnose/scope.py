"""What can be written at a line of the program, by its source alone: which names are bound there, and the words that
the program itself uses for a device in that scope. Proves that a fix would run in its place; writes none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from trimtab.diagnose import source

_WORD = re.compile(r"(^|_)(dev|device|gpu)(_?id)?\d*$", re.IGNORECASE)
_HOLDERS = re.compile(r"^(self|args?|cfg|conf|config|opts?|hparams|settings|accelerator|fabric|trainer)$")
"""Names that mean the same object wherever a program uses them."""


def is_bound(file: str, line: int, name: str) -> bool:
    """Whether a name has a value when the statement on a line runs: bound before it, a parameter, or of the module."""
    function = source.function_at(file, line)
    if function is not None:
        inside = bindings(function, name)
        if name in arguments(function) or any(at < line for at in inside):
            return True
        if inside:
            return False  # a local name that gets its value later
        for outer in source.above(file, function):
            if isinstance(outer, source.Function) and (
                name in arguments(outer) or any(at < function.lineno for at in bindings(outer, name))
            ):
                return True
    module = source.tree(file)
    found = bindings(module, name) if module is not None else []
    if function is not None:
        # Another file that imports this one never runs what stands under `if __name__ == "__main__"`.
        return any(not _as_script(file, at) for at in found)
    return any(at < line for at in found)


def _as_script(file: str, line: int) -> bool:
    around = source.above(file, source.statement(file, line) or ast.Pass())
    return any(isinstance(n, ast.If) and "__name__" in source.names_in(n.test) for n in around)


def arguments(function: source.Function) -> list[str]:
    """The names of a function's parameters."""
    args = function.args
    return [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg) if a]


def bindings(inside: ast.AST, name: str) -> list[int]:
    """The lines of a scope at which a name gets a value."""
    found = []
    for node in source.own_statements(inside):
        if name in source.bound(node) or name == getattr(node, "name", None):
            found.append(node.lineno)
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [node.lineno for a in node.names if name == (a.asname or a.name.partition(".")[0])]
    return found


def texts(file: str, line: int, wrong: frozenset[str], below: int = 9) -> list[str]:
    """What the program writes for a device and can write on a line, the nearest first."""
    found: dict[str, int] = {}
    for text, rank in _said(file, line):
        found[text] = min(rank, found.get(text, rank))
    near = [text for text, rank in found.items() if rank < below and text not in wrong]
    return sorted(near, key=lambda text: (found[text], _plainness(text), len(text)))


GLOBAL = 2
"""How far a name stands that only the module knows."""


def device_words(call: ast.Call) -> Iterator[str]:
    """The devices that a call spells out: `"cuda:1"`, and "cuda" of `.cuda()`."""
    move = source.is_move(call)
    if move and source.called_name(call) == "cuda" and not call.args and not call.keywords:
        yield "cuda"
    given = [*(call.args[:1] if move else ()), source.keyword(call, "device")]
    yield from (g.value for g in given if isinstance(g, ast.Constant) and isinstance(g.value, str))


def _said(file: str, line: int) -> Iterator[tuple[str, int]]:
    """What the program writes for a device and can be written on a line too, each with how near it stands."""
    function, owner = source.function_at(file, line), source.class_at(file, line)
    for node in source.walk(file):
        for text in device_texts(node):
            root = text.split(".")[0].split("[")[0]
            at = getattr(node, "lineno", 0)
            near = source.function_at(file, at) is function
            if not root.isidentifier() or not is_bound(file, line, root):
                continue
            if not near and not _WORD.search(root) and not _HOLDERS.match(root):
                continue
            if root == "self" and (owner is None or source.class_at(file, at) is not owner):
                continue
            if root == "self" and not near and function is not None and function.name == "__init__":
                # Another method uses it; here it may not be set yet.
                attribute = text.split(".")[1] if "." in text else ""
                if not any(s < line for s in _self_bindings(function, attribute)):
                    continue
            yield text, 0 if near else 1 if root == "self" else GLOBAL
    yield from ((text, 1) for text in _helpers(file, line))
    if function is not None:
        yield from ((name, 0) for name in arguments(function) if _WORD.search(name))
    for node in source.own_statements(source.scope_at(file, line)):
        for name in source.bound(node):
            if _WORD.search(name) and node.lineno < line:
                yield name, 0


def _helpers(file: str, line: int) -> Iterator[str]:
    """The device of an object that the program made to place things by: `accelerator = Accelerator()`."""
    for node in source.walk(file):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call) or node.lineno >= line:
            continue
        placing = source.called_name(node.value) in ("Accelerator", "Fabric")
        for target in node.targets if placing else ():
            root = source.root(target)
            if root and is_bound(file, line, root):
                yield f"{ast.unparse(target)}.device"


def _self_bindings(function: source.Function, attribute: str) -> list[int]:
    targets = [t for n in source.own_statements(function) if isinstance(n, ast.Assign) for t in n.targets]
    flat = [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return [t.lineno for t in flat if isinstance(t, ast.Attribute) and t.attr == attribute]


def device_texts(node: ast.AST) -> Iterator[str]:
    """The expressions that stand where a device is asked for, or are named so."""
    given: list[ast.expr | None] = []
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "cuda") and node.args:
            given.append(node.args[0])
        given.append(source.keyword(node, "device"))
    if isinstance(node, ast.Attribute) and node.attr == "device" and isinstance(node.ctx, ast.Load):
        given.append(node)
    if isinstance(node, ast.Assign):
        for target in node.targets:
            flat = target.elts if isinstance(target, ast.Tuple) else [target]
            given += [t for t in flat if isinstance(t, ast.Attribute) and _WORD.search(t.attr)]
    for one in given:
        if isinstance(one, ast.Name | ast.Attribute | ast.Subscript) and source.root(one):
            yield ast.unparse(one)


def sounds_like_device(text: str) -> bool:
    """Whether an expression is named as a device is: `device`, `self.dev`, `args.gpu_id`."""
    return _WORD.search(text.split(".")[-1].split("[")[0]) is not None


def _plainness(text: str) -> int:
    """A variable or setting that names the device before a tensor that happens to lie there."""
    if _WORD.search(text):
        return 0
    return 1 if text.startswith(("self.", "args.", "cfg.", "config.", "accelerator.")) else 2
