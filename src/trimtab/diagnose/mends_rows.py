"""What to write where ranks share out their rows: samplers, and the epoch that they are told. Reads source, runs
nothing; changes no file."""

from __future__ import annotations

import ast
import copy
import linecache

from trimtab.diagnose import flow, rewrite, source, trace
from trimtab.diagnose.finding import Edit, Place
from trimtab.diagnose.mends_ranks import Fix, imported, prepare


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
    if kept and (prepared := prepare(place, kept)) is not None:
        return prepared
    return _with_sampler(place, call, data, rows)


def _with_sampler(place: Place, call: ast.Call, data: ast.expr | None, rows: str) -> Fix:
    name = imported(place.file, "DistributedSampler", "torch.utils.data.DistributedSampler")
    shuffles = source.is_constant(source.keyword(call, "shuffle"), True)
    made = f"{name or 'DistributedSampler'}({rows}{'' if shuffles else ', shuffle=False'})"
    idle = _idle_sampler(place, rows)
    made, shuffles = (idle, False) if idle is not None else (made, shuffles)
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


def _idle_sampler(place: Place, rows: str) -> str | None:
    """The name of a DistributedSampler of these rows that the function has made and given to no loader."""
    for call in source.calls(place.file, "DistributedSampler"):
        node = source.statement(place.file, call.lineno)
        same = source.function_at(place.file, call.lineno) is source.function_at(place.file, place.line)
        if not same or call.lineno >= place.line or not call.args or ast.unparse(call.args[0]) != rows:
            continue
        if isinstance(node, ast.Assign) and node.value is call and isinstance(node.targets[0], ast.Name):
            return node.targets[0].id
    return None


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


def one_seed(made: Place | None) -> Fix:
    """The seed of a sampler without what makes it differ from rank to rank."""
    fix = "Give the sampler the same seed on every rank"
    for call in source.call_on(made.file, made.line) if made is not None else ():
        seed = source.keyword(call, "seed")
        if made is None or seed is None:
            continue
        place, value = trace.decided(made.file, made.line, seed)
        if isinstance(value, ast.BinOp):
            kept = [side for side in (value.left, value.right) if "rank" not in ast.unparse(side).lower()]
            if len(kept) == 1:
                code = ast.unparse(kept[0])
                return Fix(f"{fix}: {code}.", place, [rewrite.in_place_of(place.file, value, code)])
        return Fix(f"{fix}: it is `{ast.unparse(value)}` here.", place)
    return Fix(f"{fix}.", made)


_SHUFFLES = ("random_split", "shuffle", "randperm", "permutation", "sample", "train_test_split")


def one_order(at: Place | None, *, needed: bool = False) -> Fix:
    """A split or shuffle at or before a line, made to come out alike on every rank; `needed`: no place without one."""
    fix = "Shuffle and split in the same way on every rank"
    if at is None:
        return Fix(f"{fix}.")
    around = source.function_at(at.file, at.line)
    calls = [
        call
        for call in source.calls(at.file, *_SHUFFLES)
        if call.lineno <= at.line and source.function_at(at.file, call.lineno) is around
    ]
    if not calls:
        return Fix(f"{fix}.", None if needed else at)
    call = max(calls, key=lambda c: c.lineno)
    code = _seeded(at.file, call)
    place = source.place(at.file, call.lineno)
    if code is None:
        return Fix(f"{fix}: seed it by a number that all of them have.", place)
    return Fix(f"{fix}: {code}.", place, [rewrite.in_place_of(at.file, call, code)])


def _seeded(file: str, call: ast.Call) -> str | None:
    """A call that draws from a shared generator of random numbers, with one of its own instead."""
    name, owner = source.called_name(call), ast.unparse(call.func).rpartition(".")[0]
    given = ", ".join(ast.unparse(part) for part in (*call.args, *call.keywords))
    if name in ("random_split", "randperm") and source.keyword(call, "generator") is None:
        torch = imported(file, "Generator", "torch.Generator")
        return rewrite.with_keyword(file, call, "generator", f"{torch}().manual_seed(0)") if torch else None
    if owner == "random" and name in ("shuffle", "sample"):
        return f"random.Random(0).{name}({given})"
    if owner in ("np.random", "numpy.random"):
        return f"{owner}.RandomState(0).{name}({given})"
    if name == "train_test_split" and source.keyword(call, "random_state") is None:
        return rewrite.with_keyword(file, call, "random_state", "0")
    return None


def sliced_by_rank(file: str) -> Place | None:
    """The line of a file that takes every so-many-th row for this rank: `rows[rank::world]`."""
    for node in source.walk(file):
        by_rank = isinstance(node, ast.Slice) and node.lower is not None and node.step is not None
        if by_rank and "rank" in ast.unparse(node.lower).lower():  # type: ignore[attr-defined]
            return source.place(file, node.lower.lineno)  # type: ignore[attr-defined]
    return None


def among_workers(method: Place | None) -> Fix:
    """An `__iter__` that gives all rows in every worker of a loader, so that each worker gives its own part."""
    function = source.function_at(method.file, method.line) if method is not None else None
    over = _gone_through(method.file, function) if method is not None and function is not None else None
    statement = source.statement_of(method.file, over) if method is not None and over is not None else None
    if method is None or function is None or over is None or statement is None:
        text = "Let each worker give its own part: in __iter__ of the data set, itertools.islice of its rows from "
        return Fix(f"{text}torch.utils.data.get_worker_info().id on, in steps of its num_workers.", method)
    file, asks = method.file, imported(method.file, "get_worker_info", "torch.utils.data.get_worker_info")
    name = "worker" if "worker" not in source.names_in(function) else "this_worker"
    lines = [] if "import itertools\n" in linecache.getlines(file) else ["import itertools"]
    lines += [] if asks else ["from torch.utils.data import get_worker_info"]
    lines.append(f"{name} = {asks or 'get_worker_info'}()")
    part = f"{name}.id if {name} else 0, None, {name}.num_workers if {name} else 1"
    code = f"itertools.islice({ast.unparse(over)}, {part})"
    edits = [rewrite.before(file, statement, "\n".join(lines)), rewrite.in_place_of(file, over, code)]
    # Lines can only be put before a statement that begins its line.
    alone = not linecache.getline(file, statement.lineno)[: statement.col_offset].strip()
    said = (
        f"Let each worker give its own part: {'; '.join(lines)}, then {code} in place of {ast.unparse(over)}."
    )
    return Fix(said, source.place(file, statement.lineno), edits if alone else [])


def _gone_through(file: str, function: source.Function) -> ast.expr | None:
    """What an `__iter__` goes through, where there is one such thing: what it loops over, or what it returns."""
    own = [n for n in ast.walk(function) if source.function_at(file, getattr(n, "lineno", 0)) is function]
    yields = [n for n in own if isinstance(n, ast.Yield | ast.YieldFrom)]
    if not yields:
        given = [n.value for n in own if isinstance(n, ast.Return) and n.value is not None]
        itself = given and ast.unparse(given[0]) in [a.arg for a in function.args.args[:1]]
        return given[0] if len(given) == 1 and not itself and function.name == "__iter__" else None
    # A loop that only counts (epochs) is none over rows: its variable is not used.
    loops = [n for n in own if isinstance(n, ast.For) and any(y in ast.walk(n) for y in yields)]
    loops = [
        n for n in loops if source.bound(n) & {name for part in n.body for name in source.names_in(part)}
    ]
    outer = [n for n in loops if not any(n is not other and n in ast.walk(other) for other in loops)]
    if len(outer) == 1 and all(y.lineno >= outer[0].lineno for y in yields):
        return outer[0].iter
    return (
        yields[0].value if len(yields) == 1 and not loops and isinstance(yields[0], ast.YieldFrom) else None
    )
