"""How a line whose numbers stop being finite is mended: what to write on it, by what it computes. Runs nothing.

Where the code of the mend is certain to run in that place it is given as an edit too; a limit of 1e-12 is meant for
float32, smaller types get one that they can hold.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from trimtab.diagnose import rewrite, source, trace
from trimtab.diagnose.finding import Edit, Place

Mend = tuple[str, list[Edit]]
_LOGS = frozenset(("log", "log2", "log10", "xlogy"))
_ROOTS = frozenset(("sqrt", "rsqrt"))
_SPREADS = frozenset(("std", "var", "std_mean", "var_mean"))
_DIVIDES = frozenset(
    ("div", "true_divide", "__truediv__", "__rtruediv__", "__itruediv__", "div_", "reciprocal")
)


def least(dtype: str) -> str:
    """A number that is small and that a type can hold, as code."""
    return {"float16": "1e-4", "bfloat16": "1e-8", "float64": "1e-12"}.get(dtype, "1e-8")


def of_zero(
    place: Place, name: str, dtype: str, node: ast.expr | None = None, backward: bool = False
) -> Mend | None:
    """The mend for an operation on zero: a root, a logarithm, a quotient; `backward` where only its gradient breaks."""
    if (vanished := _vanished(place, dtype)) is not None:
        return vanished
    name = name.strip("_") if name.strip("_") in _LOGS | _ROOTS | _SPREADS | {"pow", "norm"} else name
    calls = [
        n for n in _header(place) if isinstance(n, ast.Call) and source.called_name(n).rstrip("_") == name
    ]
    calls = [n for n in calls if n is node] or calls
    small = "1e-12" if dtype in ("float32", "float64") and name in _ROOTS else least(dtype)
    if name in _LOGS | _ROOTS:
        return _within(place, calls, f"Keep what {name} is given above 0", f"min={small}")
    if name in _SPREADS:
        return _spread(place, calls, name)
    if name in _DIVIDES:
        return _divided(place, small)
    if name in ("acos", "asin"):
        said = f"Keep what {name} is given inside of -1 and 1"
        return _within(place, calls, said, "-1 + 1e-6, 1 - 1e-6")
    last = calls[0].args[-1] if len(calls) == 1 and calls[0].args else None
    if name == "hypot" and last is not None:
        code = f"{rewrite.operand(last)} + {small}"
        said = f"{name} has no slope where both that it is given are 0: keep one away from it, {code}."
        return said, [rewrite.in_place_of(place.file, last, code)]
    if name == "pow" and backward:
        return (
            f"The slope of {name} at 0 is infinite: keep what it is given away from 0 (add {small}, or clamp it).",
            [],
        )
    return None


def of_nothing(file: str, node: ast.expr | None, name: str) -> Mend:
    """A mean over what a mask has left nothing of: the sum of nothing is 0, and keeps its graph."""
    given = next(iter(getattr(node, "args", ())), None)
    if isinstance(node, ast.Call) and source.called_name(node) == name and "loss" not in name:
        given = _given(node) if len(node.args) + len(node.keywords) == (_given(node) in node.args) else None
    if node is None or given is None or isinstance(given, ast.Starred):
        return f"Nothing is left to take the {name} of: skip the batch, or divide the sum by at least 1.", []
    rows = rewrite.operand(given)
    code = f"({ast.unparse(node)} if {rows}.numel() else {rows}.sum())"
    return f"Take the sum, which is 0, where nothing is left: {code}.", [
        rewrite.in_place_of(file, node, code)
    ]


def _vanished(place: Place, dtype: str) -> Mend | None:
    """A guard against zero that is itself zero in half precision: on the line, or under a name that it uses."""
    if dtype != "float16":
        return None
    for at, node in _constants(place):
        if isinstance(node.value, float) and 0 < node.value < 2.9e-8:
            line = f" (line {at.line})" if at.line != place.line else ""
            said = f"{rewrite.text_of(at.file, node)}{line} is 0 in float16 and guards against nothing"
            edits = [rewrite.in_place_of(at.file, node, "1e-4")]
            return f"{said}: write 1e-4, or compute this in float32.", edits
    return None


def _constants(place: Place) -> Iterator[tuple[Place, ast.Constant]]:
    """The numbers that a line computes with, and where they are written: there, or where a name gets its value."""
    for node in _header(place):
        at, value = place, node
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            at, value = trace.decided(place.file, place.line, node)
        if isinstance(value, ast.Constant) and isinstance(value.value, float | int):
            yield at, value


def of_infinite(places: Iterable[Place], dtype: str) -> tuple[Place, str, list[Edit]] | None:
    """A number beyond float16 that became infinite in it, and the one to write: the first of these lines with one."""
    if dtype != "float16":
        return None
    for place in places:
        for at, node in _constants(place):
            if isinstance(node.value, int | float) and abs(node.value) > 65504:
                number = rewrite.text_of(at.file, node)
                said = (
                    f"{number} is infinite in float16 (which ends at 65504), and 0 times infinity is NaN: "
                    "write 1e4, or hide with masked_fill and torch.finfo(dtype).min."
                )
                return at, said, [rewrite.in_place_of(at.file, node, "1e4")]
    return None


def of_exp(file: str, node: ast.expr | None, name: str) -> Mend:
    """An exponential beyond float32: the logarithm of a sum as torch has it, else what it is given, bounded."""
    said = f"Keep what {name} is given below 80"
    given = _given(node)
    if node is None or given is None:
        return f"{said}: .clamp(max=80), or work with logarithms (logsumexp, log_softmax).", []
    outer = [n for n in source.above(file, node) if isinstance(n, ast.Call)][:2]
    if [source.called_name(n) for n in outer] == ["sum", "log"]:
        total, log = outer
        dim = source.keyword(total, "dim") or next((a for a in total.args if _given(total) is not a), None)
        if dim is not None:
            code = f"torch.logsumexp({ast.unparse(given)}, {ast.unparse(dim)})"
            return f"Take the logarithm of the sum as a whole: {code}.", [
                rewrite.in_place_of(file, log, code)
            ]
    code = f"{rewrite.operand(given)}.clamp(max=80)"
    fix = f"{said}: {code}, or work with logarithms (logsumexp, log_softmax)."
    return fix, [rewrite.in_place_of(file, given, code)]


def _given(node: ast.expr | None) -> ast.expr | None:
    """What a function or method is applied to: its first argument, or the object before the dot."""
    if isinstance(node, ast.BinOp):
        return node.left
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Attribute) and not _is_module(node.func.value):
        return node.func.value
    return next((a for a in node.args if not isinstance(a, ast.Starred)), None)


def in_float32(file: str, node: ast.expr | None, back: bool) -> Mend:
    """An operation whose result float16 cannot hold, computed in float32: what it is given, cast.

    Where no autocast is open, the layers behind it are in float16: what they are given has to be cast `back`.
    """
    said = "Compute this in float32 (or use bfloat16, which has the range of float32)"
    given = _given(node)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        left, right = rewrite.operand(node.left), rewrite.operand(node.right)
        wide = f"{left}.float() @ {right}.float(), cast back when it is small again (after the softmax)"
        return f"{said}: {wide}; or scale {left} down before the product.", []
    if given is None or isinstance(given, ast.Constant):
        return f"{said}: .float() on what it is given.", []
    code = f"{rewrite.operand(given)}.float()"
    if back:
        return f"{said}: {code}, and cast back, .to({ast.unparse(given)}.dtype), where it is small again.", []
    return f"{said}: {code}.", [rewrite.in_place_of(file, given, code)]


def _header(place: Place) -> Iterator[ast.AST]:
    node = source.statement(place.file, place.line)
    return source.header(node) if node is not None else iter(())


def _within(place: Place, calls: list[ast.Call], said: str, bounds: str) -> Mend:
    """What one call is given, kept within bounds."""
    given = _given(calls[0]) if len(calls) == 1 else None
    if given is None:
        return f"{said}: .clamp({bounds}).", []
    if (name := _divides_too(place, given)) is not None and (
        node := source.statement(place.file, place.line)
    ):
        code = f"{name} = {name}.clamp({bounds})"
        fix = f"{said}, and what is divided by: {code} before this line."
        return fix, [rewrite.before(place.file, node, code)]
    code = f"{rewrite.operand(given)}.clamp({bounds})"
    return f"{said}: {code}.", [rewrite.in_place_of(place.file, given, code)]


def _divides_too(place: Place, given: ast.expr) -> str | None:
    """The one variable in an expression, if the same line divides by it."""
    roots = [n for n in ast.walk(given) if isinstance(n, ast.Name) and not _is_module(n)]
    divisors = [n.right for n in _header(place) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div)]
    same = [n for n in divisors if isinstance(n, ast.Name) and n.id in {root.id for root in roots}]
    return same[0].id if len({root.id for root in roots}) == 1 and same else None


def _is_module(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("torch", "F", "np", "math")


def _spread(place: Place, calls: list[ast.Call], name: str) -> Mend:
    said = "Of one value there is no spread: take the uncorrected one, which is 0 then"
    if len(calls) != 1:
        return f"{said} ({name}(..., correction=0)), or see that there are always two.", []
    old = source.keyword(calls[0], "unbiased") or source.keyword(calls[0], "correction")
    if old is not None:
        return f"{said}: unbiased=False, or see that there are always two.", []
    edits = [rewrite.add_keyword(place.file, calls[0], "correction", "0")]
    return f"{said} ({name}(..., correction=0)), or see that there are always two.", edits


def _divided(place: Place, small: str) -> Mend:
    quotients = [n for n in _header(place) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div)]
    tensors = [n for n in quotients if not isinstance(n.right, ast.Constant)]
    if len(tensors) != 1:
        return f"Keep the divisor away from 0: add {small} to it, or clamp it (min={small}).", []
    right = tensors[0].right
    code = f"({ast.unparse(right)} + {small})"
    return f"Keep the divisor away from 0: / {code}.", [rewrite.in_place_of(place.file, right, code)]


def of_mask(place: Place, dtype_of: str) -> Mend | None:
    """The mend for a mask of -inf that hides a whole row: the type's own smallest number leaves softmax a sum."""
    for call in (n for n in _header(place) if isinstance(n, ast.Call) and source.called_name(n) == "triu"):
        first = source.keyword(call, "diagonal") or next(iter(call.args[1:]), None)
        if first is None or source.is_constant(first, 0):
            said = "A position has to see itself, or the first one sees nothing: triu with diagonal=1."
            edit = rewrite.add_keyword(place.file, call, "diagonal", "1")
            return said, [rewrite.in_place_of(place.file, first, "1") if first is not None else edit]
    for node in _header(place):
        if _is_minus_infinity(node) and isinstance(node, ast.expr):
            code = f"torch.finfo({dtype_of}).min"
            return (
                f"A row in which everything is hidden has no softmax: hide with {code} instead of -inf, or leave such "
                "rows out.",
                [rewrite.in_place_of(place.file, node, code)],
            )
    return None


def _is_minus_infinity(node: ast.AST) -> bool:
    known = ("float('-inf')", "-float('inf')", "-torch.inf", "-math.inf", "-np.inf", "-inf")
    return isinstance(node, ast.expr) and ast.unparse(node).replace('"', "'") in known


def of_eps(made: Place, dtype: str) -> Mend:
    """The mend for an eps that is zero in the weights' own precision."""
    fix = (
        f"Give the optimizer an eps that {dtype} can hold (eps=1e-4), or keep the weights in float32 and let "
        "torch.autocast use half precision."
    )
    value = getattr(source.statement(made.file, made.line), "value", None)
    if isinstance(value, ast.Call) and source.called_name(value)[:1].isupper():
        return fix, [rewrite.add_keyword(made.file, value, "eps", "1e-4")]
    return fix, []
