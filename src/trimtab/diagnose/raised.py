"""From an exception that a program raised to a finding: kind and fix from the known texts, the line from the source.

The line that fails is the innermost of the user's own; the line to change is looked for by what the error says: the
arguments of the trainer that dropped a column, the checkpoint call that is re-entrant, the cast to half precision.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from trimtab.diagnose import source
from trimtab.diagnose.explain import match_message
from trimtab.diagnose.finding import Cause, Finding, Place
from trimtab.diagnose.logtext import is_library


def diagnose_exception(error: BaseException, places: Sequence[Place]) -> Finding:
    """The finding for an exception; `places` are its frames, innermost first."""
    known: Finding | None = getattr(getattr(error, "fault", None), "_finding", None)
    if known is not None:
        return known
    own = [p for p in places if _is_users(p.file)]
    where = own[0] if own else (places[0] if places else None)
    library = _library_line(places, where)
    text = _text(error)
    finding = Finding(kind="other-error", message=text, where=where, library=library)
    context = "\n".join(f"{p.file} {p.code}" for p in places)
    if matched := match_message(text, context):
        pattern, fields = matched
        finding.kind, finding.fix = pattern.kind, pattern.fix.format_map(fields)
        why = pattern.cause.format_map(fields)
        finding.cause = _specific(pattern.name, error, own, why) or _at(where, why)
        _add_keys(finding, pattern.name, fields, error)
    elif where is not None:
        finding.fix = (
            "the program itself fails here, whatever the device; correct this line or what it is given"
        )
    return finding


def _text(error: BaseException) -> str:
    name = type(error).__name__
    said = str(error)
    return f"{name}: {said}" if said else name


def _is_users(file: str) -> bool:
    from trimtab.virtual.origin import is_user_file

    return is_user_file(file)


def _library_line(places: Sequence[Place], where: Place | None) -> Place | None:
    """The innermost line that is neither torch's nor the user's, if it is deeper than the user's."""
    for place in places:
        if place == where:
            return None
        if not _in_torch(place.file) and not place.file.startswith("<") and is_library(place.file):
            return place
    return None


def _in_torch(file: str) -> bool:
    return f"{os.sep}torch{os.sep}" in file


def _at(place: Place | None, why: str) -> Cause | None:
    return Cause(place.file, place.line, place.code, why) if place is not None else None


def _specific(name: str, error: BaseException, own: Sequence[Place], why: str) -> Cause | None:
    rule = _RULES.get(name)
    if rule is None or not own:
        return None
    for file in dict.fromkeys(p.file for p in own):
        if line := rule(file, own, error):
            return source.cause(file, line, why)
    return None


def _trainer_arguments(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """Where the settings that a trainer was given are made."""
    return _trainer_argument(file, own, "args", 1)


def _trainer_dataset(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """Where the data that a trainer was given is made."""
    return _trainer_argument(file, own, "train_dataset", None)


def _trainer_argument(file: str, own: Sequence[Place], keyword: str, position: int | None) -> int | None:
    for node in source.walk(file):
        if not isinstance(node, ast.Call) or not source.called_name(node).endswith("Trainer"):
            continue
        value = source.keyword(node, keyword)
        if value is None and position is not None and len(node.args) > position:
            value = node.args[position]
        if isinstance(value, ast.Name):
            made = source.last_assignment(file, node.lineno, value.id)
            return made.lineno if made is not None else node.lineno
        return value.lineno if value is not None else node.lineno
    return None


def _missing_column(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """A collator misses a column that the trainer dropped: the settings of the trainer; else the"
    " failing line."""
    trainers = [value for value in _values(error, "self") if hasattr(value, "_remove_unused_columns")]
    key = str(error.args[0]) if error.args else ""
    for trainer in trainers:
        columns = getattr(getattr(trainer, "train_dataset", None), "column_names", None) or []
        if key in columns and getattr(trainer.args, "remove_unused_columns", False):
            return _trainer_arguments(file, own, error)
    return None


def _reentrant(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """A checkpoint call that is re-entrant, by word or by default; else the return of an opaque output."""
    calls = [n for n in source.walk(file) if isinstance(n, ast.Call)]
    for call in calls:
        if _is_true(source.keyword(call, "use_reentrant")):
            return call.lineno
        if _is_true(_entry(source.keyword(call, "gradient_checkpointing_kwargs"), "use_reentrant")):
            return call.lineno
    for call in calls:
        if source.called_name(call) in ("checkpoint", "checkpoint_sequential") and not source.keyword(
            call, "use_reentrant"
        ):
            return call.lineno
        if (
            source.called_name(call) == "gradient_checkpointing_enable"
            and not call.args
            and not call.keywords
        ):
            return call.lineno
    return _opaque_return(file)


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _entry(node: ast.expr | None, key: str) -> ast.expr | None:
    if not isinstance(node, ast.Dict):
        return None
    pairs = zip(node.keys, node.values, strict=True)
    return next((v for k, v in pairs if isinstance(k, ast.Constant) and k.value == key), None)


def _opaque_return(file: str) -> int | None:
    """A `return` of forward that builds an object of a plain class of this file: DDP cannot look into it."""
    plain = {
        node.name
        for node in source.walk(file)
        if isinstance(node, ast.ClassDef) and not node.bases and not node.decorator_list
    }
    for node in source.walk(file):
        if isinstance(node, ast.FunctionDef) and node.name == "forward":
            for inner in ast.walk(node):
                value = inner.value if isinstance(inner, ast.Return) else None
                if isinstance(value, ast.Call) and source.called_name(value) in plain:
                    return value.lineno
    return None


def _unused_branch(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """A layer that __init__ makes and no other method uses: where it is unfrozen, else where it is made."""
    if opaque := _opaque_return(file):
        return opaque
    for node in source.walk(file):
        if not isinstance(node, ast.ClassDef):
            continue
        for attribute, line in _unused_layers(node):
            return _unfrozen(file, node, attribute) or line
    lines = [p.line for p in own if p.file == file]
    return next((found for line in lines if (found := _unused_output(file, line))), None)


def _unused_output(file: str, line: int) -> int | None:
    """The model returned several outputs and the loss reads only some: the line that makes the loss."""
    node = source.statement(file, line)
    bound = source.bound(node)
    if len(bound) < 2:
        return None
    scope = source.function_at(file, line) or source.tree(file)
    read = (
        [n for n in ast.walk(scope) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        if scope
        else []
    )
    if bound <= {n.id for n in read}:
        return None
    return min((n.lineno for n in read if n.id in bound and n.lineno > line), default=None)


def _carried_state(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """A variable that a loop computes from its own last value, with the graph of the last round."""
    line = own[0].line
    for node in source.walk(file):
        if not isinstance(node, ast.For | ast.While) or not node.lineno < line <= (node.end_lineno or 0):
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Call | ast.BinOp):
                again = source.bound(inner) & source.names_in(inner.value)
                if again and "detach" not in ast.unparse(inner.value) and not source.has_move(inner.value):
                    return inner.lineno
    return None


def _unused_layers(owner: ast.ClassDef) -> Iterator[tuple[str, int]]:
    methods = [m for m in owner.body if isinstance(m, source.Function)]
    if not any(m.name == "forward" for m in methods):
        return
    used = {
        inner.attr
        for method in methods
        if method.name != "__init__"
        for inner in ast.walk(method)
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "self"
    }
    for method in (m for m in methods if m.name == "__init__"):
        for inner in ast.walk(method):
            if isinstance(inner, ast.Assign):
                for target, value in _pairs(inner):
                    if (
                        target not in used
                        and isinstance(value, ast.Call)
                        and source.called_name(value)[:1].isupper()
                    ):
                        yield target, inner.lineno


def _pairs(node: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            sides = list(zip(target.elts, node.value.elts, strict=False))
        else:
            sides = [(target, node.value)]
        for left, right in sides:
            if isinstance(left, ast.Attribute):
                yield left.attr, right


def _unfrozen(file: str, owner: ast.ClassDef, attribute: str) -> int | None:
    for node in source.walk(file):
        if isinstance(node, ast.Call) and source.called_name(node) == "requires_grad_":
            inside = owner.lineno <= node.lineno <= (owner.end_lineno or 0)
            if not inside and re.search(rf"\.{attribute}\b", ast.unparse(node.func)):
                return node.lineno
    return None


def _half_cast(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """The line that makes or casts weights in half precision, outside of autocast."""
    for node in source.walk(file):
        if not isinstance(node, ast.Call) or source.called_name(node) in ("autocast", "autocast_mode"):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr == "half":
            return node.lineno
        given = (*node.args, *(k.value for k in node.keywords))
        if any(isinstance(v, ast.Attribute) and v.attr in ("float16", "half") for v in given):
            return node.lineno
        if any(isinstance(v, ast.Constant) and v.value in ("float16", "fp16", "half") for v in given):
            return node.lineno
    return None


def _rebuilt_loss(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """A loss that is made anew as a leaf: torch.tensor(…, requires_grad=True), or .requires_grad_() on it."""
    calls = [n for n in source.walk(file) if isinstance(n, ast.Call)]
    for call in calls:
        made = source.called_name(call) in ("tensor", "as_tensor", "Tensor", "Variable")
        if made and _is_true(source.keyword(call, "requires_grad")):
            return call.lineno
    for call in calls:
        cut = isinstance(call.func, ast.Attribute) and call.func.attr in ("requires_grad_", "detach", "item")
        if cut and "loss" in ast.unparse(call.func):
            return call.lineno
    return None


def _frozen(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """All parameters of the optimizer are frozen: the line that freezes; else a loss that was rebuilt."""
    optimizers = [v for v in _values(error, "optimizer") if hasattr(v, "param_groups")]
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if parameters and not any(p.requires_grad for p in parameters):
        for node in source.walk(file):
            if (
                isinstance(node, ast.Call)
                and source.called_name(node) == "requires_grad_"
                and _is_false(node.args)
            ):
                return node.lineno
            if (
                isinstance(node, ast.Assign)
                and _is_false([node.value])
                and "requires_grad" in ast.unparse(node)
            ):
                return node.lineno
    return _rebuilt_loss(file, own, error)


def _is_false(nodes: Sequence[ast.expr]) -> bool:
    return bool(nodes) and isinstance(nodes[0], ast.Constant) and nodes[0].value is False


def _without_grad(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """The loss was computed under no_grad: the line that switches gradients off; else a loss that was rebuilt."""
    where = own[0]
    for name in (
        sorted(source.names_in(node)) if (node := source.statement(file, where.line)) is not None else ()
    ):
        made = source.last_assignment(file, where.line, name)
        for block in source.withs_around(file, made.lineno) if made is not None else ():
            opened = " ".join(ast.unparse(item.context_expr) for item in block.items)
            if "no_grad" in opened or "inference_mode" in opened:
                return block.lineno
    return _rebuilt_loss(file, own, error)


def _device_number(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """The line that chose the number of the device."""
    line = own[0].line
    node = source.statement(file, line)
    for name in sorted(source.names_in(node)) if node is not None else ():
        made = source.last_assignment(file, line, name)
        if made is not None and "cuda" in ast.unparse(made):
            return made.lineno
    return None


def _stray_local(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """Among the tensors in the failing call's variables: where the one that stayed on the CPU was made."""
    from trimtab.virtual import origin

    for frame in _frames(error):
        for value in list(frame.f_locals.values()):
            for tensor in value if isinstance(value, tuple | list) else [value]:
                if (
                    getattr(tensor, "device", None) is None
                    or str(tensor.device) != "cpu"
                    or not hasattr(tensor, "dtype")
                ):
                    continue
                born = origin.born_of(tensor)
                if born is not None and born.file == file:
                    return born.line
    return None


def _world_size(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """The line that trusts a launcher's variable."""
    for node in source.walk(file):
        if isinstance(node, ast.Call) and source.called_name(node) in ("get", "getenv"):
            asked = {a.value for a in node.args if isinstance(a, ast.Constant)}
            if asked & {"WORLD_SIZE", "RANK", "LOCAL_RANK"}:
                return node.lineno
    return None


Rule = Callable[[str, Sequence[Place], BaseException], "int | None"]
_RULES: dict[str, Rule] = {
    "key-of-column": _missing_column,
    "key-in-data": _missing_column,
    "columns-dropped": _trainer_dataset,
    "no-loss": _trainer_dataset,
    "ddp-ready-twice-checkpoint": _reentrant,
    "checkpoint-no-grad-input": _reentrant,
    "ddp-unused": _unused_branch,
    "unscale-fp16": _half_cast,
    "scaler-bf16": _half_cast,
    "no-inf-checks": _frozen,
    "no-grad-fn": _without_grad,
    "invalid-ordinal": _device_number,
    "backward-twice": _carried_state,
    "rnn-hidden": _stray_local,
    "stale-store": _world_size,
    "store-connect": _world_size,
}


def _add_keys(finding: Finding, name: str, fields: dict[str, str], error: BaseException) -> None:
    """Name the fields that are there, from the row or batch in the failing frame."""
    if name not in ("key-of-column", "key-in-data") or finding.where is None:
        return
    missing = fields.get("name", "")
    for frame in _frames(error):
        if frame.f_code.co_filename != finding.where.file:
            continue
        for value in list(frame.f_locals.values()):
            rows = value if isinstance(value, list) and value else [value]
            if isinstance(rows[0], dict) and rows[0] and missing not in rows[0]:
                there = ", ".join(str(key) for key in list(rows[0])[:12])
                finding.message += f" (the fields that are there: {there})"
                return


def _frames(error: BaseException) -> Iterator[FrameType]:
    """The frames of an exception's traceback, innermost first."""
    found = []
    traceback = error.__traceback__
    while traceback is not None:
        found.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return iter(found[::-1])


def _values(error: BaseException, name: str) -> Iterator[Any]:
    for frame in _frames(error):
        if name in frame.f_locals:
            yield frame.f_locals[name]
