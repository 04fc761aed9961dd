"""A field that a model's output class does not have: the line of the model that puts it there, and how to be rid of it.

transformers' output classes take any key by item assignment, and are made anew from their fields by DDP. The writer is
looked for by the field's name in the source of the model that ran and of the program. Reads source only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from torch import nn

from trimtab.diagnose import source
from trimtab.diagnose.finding import Finding, Place
from trimtab.diagnose.raised_common import values_named


def explain(
    finding: Finding, error: BaseException, own: Sequence[Place], kind: str, name: str, why: str
) -> None:
    """Name the line that gives an output of class `kind` the field `name`, where the source shows it."""
    at = finding.where
    made = (
        {call.lineno for call in source.calls(at.file, kind) if source.keyword(call, name)} if at else set()
    )
    node = source.statement(at.file, at.line) if at else None
    if at is not None and node is not None and made & set(range(node.lineno, (node.end_lineno or 0) + 1)):
        said = f"{kind} has no field {name!r}, and is made with it here"
        finding.cause = source.cause(at.file, at.line, said)
        finding.fix = _fix(kind, name, f"leave {name}= out of this call")
        return
    for file in dict.fromkeys([*_model_files(error), *(place.file for place in own)]):
        for rank, line in sorted(_writers(file, name)):
            finding.cause = source.cause(file, line, why)
            written = "do not write it into the output here" if rank < 2 else "keep it out of the output"
            finding.fix = _fix(kind, name, written)
            return


def _fix(kind: str, name: str, first: str) -> str:
    return (
        f"{first} (return it beside the output, or keep it on the module), or declare it: "
        f"@dataclass class My{kind}({kind}): {name}: torch.Tensor | None = None, and return that"
    )


def _model_files(error: BaseException) -> Iterator[str]:
    """The files of the program in which the modules that ran are written, the innermost module first."""
    for owner in values_named(error, "self"):
        for module in owner.modules() if isinstance(owner, nn.Module) else ():
            code = getattr(getattr(type(module), "forward", None), "__code__", None)
            if code is not None and source.is_user_file(code.co_filename):
                yield code.co_filename


def _writers(file: str, name: str) -> Iterator[tuple[int, int]]:
    """The lines that write a field of this name, with how surely it goes into an output: inside a class with forward,
    an item or attribute of what is returned; then any other item, a dict with it."""
    models = [n for n in source.walk(file) if isinstance(n, ast.ClassDef) and _has_forward(n)]
    spans = [(n.lineno, n.end_lineno or 0) for n in models]
    for node in source.walk(file):
        if (written := _written(node, name)) is not None:
            kind, line = written
            inside = any(first <= line <= last for first, last in spans)
            yield kind + (0 if inside else 4), line


def _has_forward(node: ast.ClassDef) -> bool:
    return any(isinstance(inner, source.Function) and inner.name == "forward" for inner in node.body)


def _written(node: ast.AST, name: str) -> tuple[int, int] | None:
    """How a node writes a field, and on which line: 0 an item, 1 an attribute, 2 a keyword, 3 the key of a dict."""
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Subscript) and _is(target.slice, name):
                return 0, node.lineno
            if isinstance(target, ast.Attribute) and target.attr == name and source.root(target) != "self":
                return 1, node.lineno
    if isinstance(node, ast.Call):
        if source.called_name(node) in ("setattr", "__setitem__") and any(_is(a, name) for a in node.args):
            return 1, node.lineno
        given = source.keyword(node, name)
        if given is not None and source.called_name(node) in ("update", "dict"):
            return 2, given.lineno
    if isinstance(node, ast.Dict):
        return next(((3, key.lineno) for key in node.keys if key is not None and _is(key, name)), None)
    return None


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == name
