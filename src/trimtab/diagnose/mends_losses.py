"""How a loss is given what it wants: scores without activation, logarithms, sides of one shape. Reads source only."""

from __future__ import annotations

import ast
from typing import Any

from torch import nn

from trimtab.diagnose import rewrite, source
from trimtab.diagnose.finding import Edit, Place

Mend = tuple[str, list[Edit]]


def without_activation(
    at: Place, placed: tuple[Place, nn.Module, str] | None, word: str, as_log: bool
) -> tuple[Place, str, list[Edit]]:
    """The line that takes a softmax or sigmoid, with the activation taken out, or its logarithm for a loss of those."""
    for call in source.call_on(at.file, at.line):
        inner = _argument(call, word, placed[2] if placed is not None else "")
        if inner is None:
            continue
        if as_log:
            code = ast.unparse(call).replace("softmax(", "log_softmax(", 1)
            named = "log_softmax(" in code
            return (
                at,
                f"Give it logarithms: {code}." if named else "Give it log_softmax of the scores.",
                ([rewrite.in_place_of(at.file, call, code)] if named else []),
            )
        code = ast.unparse(inner)
        fix = f"Give the loss the scores themselves: {code}; take the {word} where probabilities are read."
        return at, fix, [rewrite.in_place_of(at.file, call, code)]
    if placed is None:
        return at, f"Give the loss the scores themselves, without the {word}.", []
    return _out_of_sequence(placed[0], word, as_log)


def _argument(call: ast.Call, word: str, attribute: str) -> ast.expr | None:
    """What a call of an activation is taken of: `F.softmax(x, 1)`, `x.softmax(-1)`, `self.act(x)`."""
    name = source.called_name(call)
    if attribute and name == attribute and len(call.args) == 1:
        return call.args[0]
    if name != word or not isinstance(call.func, ast.Attribute | ast.Name):
        return None
    method = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) not in (
        "F",
        "torch",
        "nn.functional",
    )
    if (
        method
        and isinstance(call.func, ast.Attribute)
        and not ast.unparse(call.func.value).endswith("functional")
    ):
        return call.func.value
    return call.args[0] if call.args else None


def _out_of_sequence(at: Place, word: str, as_log: bool) -> tuple[Place, str, list[Edit]]:
    """A layer of a Sequential: the call that makes it, taken out with its comma."""
    wanted = {"softmax": ("Softmax", "Softmax2d"), "sigmoid": ("Sigmoid",)}[word]
    for sequence in (c for c in source.call_on(at.file, at.line) if len(c.args) > 1):
        last: Any = sequence.args[-1]
        if not isinstance(last, ast.Call) or source.called_name(last) not in wanted:
            continue
        place = source.place(at.file, last.lineno)
        if as_log:
            code = rewrite.text_of(at.file, last).replace("Softmax", "LogSoftmax")
            return place, f"Give it logarithms: {code}.", [rewrite.in_place_of(at.file, last, code)]
        before = rewrite.end_of(at.file, sequence.args[-2])
        edits = [Edit(at.file, before, rewrite.end_of(at.file, last), "")]
        fix = f"Leave {ast.unparse(last)} out: the loss wants the scores; take the {word} where probabilities are read."
        return place, fix, edits
    return at, f"Leave the {word} out of what the loss is given.", []


def with_log_softmax(place: Place) -> Mend:
    """The scores of a line's loss as logarithms of probabilities."""
    for call in (c for c in source.call_on(place.file, place.line) if len(c.args) >= 2):
        code = f"torch.log_softmax({ast.unparse(call.args[0])}, dim=1)"
        return f"Give it {code}, or use CrossEntropyLoss.", [
            rewrite.in_place_of(place.file, call.args[0], code)
        ]
    return "Give it torch.log_softmax(…, dim=1) of the scores, or use CrossEntropyLoss.", []


def squeezed(place: Place, node: ast.expr | None) -> Mend:
    """A column made a row, where it is compared."""
    if node is None:
        return "Bring both to one shape before they are compared: .squeeze(-1) on the column.", []
    code = f"{rewrite.operand(node)}.squeeze(-1)"
    return f"Bring both to one shape: {code}.", [rewrite.in_place_of(place.file, node, code)]
