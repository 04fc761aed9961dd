"""Writes the fixes for ranks that train apart or read the same rows, with the program's own names. Changes no file."""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass, field

from trimtab.diagnose import flow, rewrite, source
from trimtab.diagnose.finding import Edit, Place

_MOVES = ("to", "cuda")
_RANKS = ("local_rank", "gpu", "gpu_id", "device", "rank")


@dataclass
class Fix:
    """What to write, where, and as changes where it runs as it stands."""

    text: str
    place: Place | None = None
    """The line to change, when it is another than the one that was asked about."""
    edits: list[Edit] = field(default_factory=list)


def wrap(made: Place | None, moved: Place | None, *, gpu: bool) -> Fix:
    """A model that nothing wraps: after the line that moved it, else before its optimizer."""
    model = _model_of(made) if made is not None else None
    if made is not None and model is not None and (prepared := _prepare(made, model)) is not None:
        return prepared
    for place in (moved, _last_binding(made, model)):
        fix = _wrap_at(place, gpu) if place is not None else None
        if fix is not None:
            return fix
    name = model or "model"
    ids = ", device_ids=[local_rank]" if gpu else ""
    return Fix(f"Wrap the model before it is trained: {name} = DistributedDataParallel({name}{ids}).")


def _wrap_at(place: Place, gpu: bool) -> Fix | None:
    node = source.statement(place.file, place.line)
    target, value = _kept(node)
    if node is None or value is None:
        return None
    ids = f", device_ids=[{_device(place, value)}]" if gpu else ""
    name = imported(place.file, "DistributedDataParallel", "torch.nn.parallel.DistributedDataParallel")
    if isinstance(node, ast.Return):
        written = f"{name or 'DistributedDataParallel'}({ast.unparse(value)}{ids})"
        edits = [rewrite.in_place_of(place.file, value, written)] if name else []
        return Fix(f"Wrap it: return {written}.", place, edits)
    if target is None:
        return None
    written = f"{target} = {name or 'DistributedDataParallel'}({target}{ids})"
    may = name is not None and _may_bind(place, target)
    return Fix(
        f"Wrap it after this line: {written}.",
        place,
        [rewrite.after(place.file, node, written)] if may else [],
    )


def _kept(node: ast.stmt | None) -> tuple[str | None, ast.expr | None]:
    """What a statement leaves the model in, and the expression that makes it."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        if isinstance(target, ast.Name | ast.Attribute):
            return ast.unparse(target), node.value
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        moves = isinstance(called, ast.Attribute) and called.attr in _MOVES
        if moves and isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name | ast.Attribute):
            return ast.unparse(called.value), node.value
    if isinstance(node, ast.Return) and node.value is not None:
        return None, node.value
    return None, None


def _may_bind(place: Place, target: str) -> bool:
    """Whether giving a name a new value there reaches those who use it."""
    if "." in target or source.function_at(place.file, place.line) is None:
        return True
    own = source.assignments(place.file, place.line, target)
    return bool(own) or target in source.parameters(place.file, place.line)


def _device(place: Place, value: ast.expr) -> str:
    """The rank's own GPU as the program writes it."""
    for call in ast.walk(value):
        moves = isinstance(call, ast.Call) and source.last_name(call.func) in _MOVES and call.args
        if moves and isinstance(call.args[0], ast.Name | ast.Attribute | ast.Subscript):  # type: ignore[attr-defined]
            return ast.unparse(call.args[0])  # type: ignore[attr-defined]
    scope = set(source.parameters(place.file, place.line))
    for name in _RANKS:
        if name in scope or source.last_assignment(place.file, place.line, name) is not None:
            return name
    return "torch.cuda.current_device()"


def _model_of(made: Place) -> str | None:
    """`model` in an optimizer that is made of `model.parameters()`."""
    for call in source.call_on(made.file, made.line):
        if source.called_name(call) in ("parameters", "named_parameters") and isinstance(
            call.func, ast.Attribute
        ):
            return ast.unparse(call.func.value)
    return None


def _last_binding(made: Place | None, model: str | None) -> Place | None:
    if made is None or model is None:
        return None
    bound = source.last_assignment(made.file, made.line, model)
    return source.place(made.file, bound.lineno) if bound is not None else None


def _prepare(made: Place, missing: str) -> Fix | None:
    """accelerate's prepare(), called with other things than this one."""
    for call in source.calls(made.file, "prepare"):
        node = source.statement(made.file, call.lineno)
        given = [ast.unparse(argument) for argument in call.args]
        accelerates = isinstance(call.func, ast.Attribute) and "accelerator" in ast.unparse(call.func.value)
        if not accelerates or missing in given or not isinstance(node, ast.Assign) or node.value is not call:
            continue
        targets = ast.unparse(node.targets[0]).strip("()")
        written = f"{missing}, {targets} = {ast.unparse(call.func)}({', '.join([missing, *given])})"
        place = source.place(made.file, node.lineno)
        return Fix(
            f"Give it to prepare() as well: {written}.",
            place,
            [rewrite.in_place_of(made.file, node, written)] if not call.keywords else [],
        )
    return None


def shard(place: Place | None, *, iterable: bool, sampled: bool) -> Fix:
    """A loader that gives every rank the same rows."""
    call = _loader(place) if place is not None else None
    if place is None or call is None:
        return Fix("Give each rank rows of its own: DataLoader(..., sampler=DistributedSampler(dataset)).")
    data = source.keyword(call, "dataset") or (call.args[0] if call.args else None)
    rows = ast.unparse(data) if data is not None else "dataset"
    if iterable:
        return Fix(
            "Let each rank read its own part: in __iter__ of the data set, "
            "itertools.islice(rows, dist.get_rank(), None, dist.get_world_size()); of a datasets stream, "
            f"split_dataset_by_node({rows}, rank, world_size)."
        )
    if sampled:
        return _as_told(place)
    target = source.statement(place.file, place.line)
    kept = ast.unparse(target.targets[0]) if isinstance(target, ast.Assign) else ""
    if kept and (prepared := _prepare(place, kept)) is not None:
        return prepared
    return _with_sampler(place, call, data, rows)


def _with_sampler(place: Place, call: ast.Call, data: ast.expr | None, rows: str) -> Fix:
    name = imported(place.file, "DistributedSampler", "torch.utils.data.DistributedSampler")
    shuffles = source.is_constant(source.keyword(call, "shuffle"), True)
    made = f"{name or 'DistributedSampler'}({rows}{'' if shuffles else ', shuffle=False'})"
    changed = copy.deepcopy(call)
    changed.keywords = [k for k in changed.keywords if k.arg not in ("shuffle", "sampler")]
    changed.keywords.append(ast.keyword("sampler", ast.parse(made, mode="eval").body))
    written = ast.unparse(changed)
    simple = isinstance(data, ast.Name | ast.Attribute) and source.keyword(call, "batch_sampler") is None
    edits = [rewrite.in_place_of(place.file, call, written)] if name and simple and len(call.args) < 3 else []
    more = ""
    if shuffles:
        more = " Call its sampler's set_epoch(epoch) at the start of every epoch."
        epoch = _epoch_call(place)
        edits += [epoch] if edits and epoch is not None else []
    return Fix(f"Give each rank rows of its own: {written}.{more}", None, edits)


def _epoch_call(place: Place) -> Edit | None:
    """`loader.sampler.set_epoch(epoch)` at the head of the loop over epochs, where that loop is plain to see."""
    node = source.statement(place.file, place.line)
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
        return None
    name = node.targets[0].id
    for loop in source.walk(place.file):
        same = isinstance(loop, ast.For) and any(
            isinstance(n, ast.Name) and n.id == name for n in ast.walk(loop.iter)
        )
        if not same or not isinstance(loop, ast.For):
            continue
        if source.function_at(place.file, loop.lineno) is not source.function_at(place.file, place.line):
            continue
        return set_epoch(source.place(place.file, loop.lineno), name)
    return None


def set_epoch(at: Place, loader: str) -> Edit | None:
    """The missing call of set_epoch, at the head of the loop over epochs around a loop over batches."""
    epochs = flow.loop_at(at)
    if not isinstance(epochs, ast.For) or not isinstance(epochs.target, ast.Name):
        return None
    if not (isinstance(epochs.iter, ast.Call) and source.called_name(epochs.iter) in ("range", "trange")):
        return None
    return rewrite.before(at.file, epochs.body[0], f"{loader}.sampler.set_epoch({epochs.target.id})")


def _as_told(place: Place) -> Fix:
    calls = [c for c in source.calls(place.file, "DistributedSampler") if c.lineno <= place.line]
    fix = "Let the sampler ask the process group: leave out num_replicas and rank."
    if not calls:
        return Fix(fix)
    call = copy.deepcopy(calls[-1])
    call.keywords = [k for k in call.keywords if k.arg not in ("num_replicas", "rank")]
    call.args = call.args[:1]
    at = source.place(place.file, calls[-1].lineno)
    return Fix(
        f"{fix} {ast.unparse(call)}", at, [rewrite.in_place_of(place.file, calls[-1], ast.unparse(call))]
    )


def _loader(place: Place) -> ast.Call | None:
    calls = [c for c in source.call_on(place.file, place.line) if source.called_name(c) == "DataLoader"]
    return min(calls, key=lambda c: (c.lineno, c.col_offset), default=None)


def imported(file: str, name: str, whole: str) -> str | None:
    """How a file may write a name of torch: as it imports it, else in full; None where it does not import torch."""
    full = None
    for node in source.walk(file):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == name:
                    return alias.asname or alias.name
        elif isinstance(node, ast.Import) and any(
            alias.name.partition(".")[0] == "torch" and alias.asname is None for alias in node.names
        ):
            full = whole
    return full
