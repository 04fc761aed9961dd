"""The rules for faults that are not about two devices: tensors that must be on the host, memory that is used up."""

from __future__ import annotations

import ast
import gc
import sys
from collections import defaultdict
from types import FrameType

import torch
from torch import nn

from trimtab.diagnose import full_of, holders, mends_graph, rewrite, scope, source
from trimtab.diagnose.finding import Edit, Place, device_of
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.rules_host import read_by_host
from trimtab.diagnose.rules_launch import without_host_backend
from trimtab.diagnose.rules_likely import assignment, birth
from trimtab.diagnose.scene import Scene
from trimtab.virtual import origin, state
from trimtab.virtual.origin import Origin

_FORKING = {"Process": 1, "Pool": 1, "ProcessPoolExecutor": 1, "fork": 2}
"""What starts a process, the likelier first."""


def host_only(scene: Scene) -> Verdict | None:
    """An operation that wants a tensor of the host and got one of a GPU: nothing else takes part."""
    suspect, here = scene.operands[0], scene.fault.frame
    if here is None:
        return None
    if scene.fault.op.startswith("c10d."):
        return without_host_backend(scene) or assignment(scene, suspect) or birth(scene, suspect)
    if scene.fault.kind != "pin-of-gpu-tensor":
        plain = Verdict(source.cause(here.file, here.line, f"the tensor is on {suspect.device}"))
        return read_by_host(scene) or plain
    place = suspect.moved or suspect.born
    line = place.line if place is not None and place.file == here.file else here.line
    if line == here.line and (kept := _kept_on_gpu()) is not None:
        why = f"the data is put on {suspect.device} here, before it is pinned"
        fix = "Leave the data on the CPU and move each batch in the training loop, or set pin_memory=False."
        return Verdict(source.cause(kept.file, kept.line, why), fix)
    if line == here.line and (moved := moved_into(here.file, here.line)):
        line = moved
    elif line == here.line:
        # A batch is put together in the loader: what moved its rows stands in the data set or the collator.
        line = _move_of_rows(here.file) or line
    return Verdict(
        source.cause(here.file, line, f"the data is put on {suspect.device} here, before it is pinned")
    )


def _kept_on_gpu() -> Place | None:
    """Where the rows of the data set that is read now were moved to the GPU, if it holds them as tensors."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        data = getattr(frame.f_locals.get("self"), "_dataset", None)
        while data is not None and not getattr(data, "tensors", None) and hasattr(data, "dataset"):
            data = data.dataset
        held = (*getattr(data, "tensors", ()), *getattr(data, "__dict__", {}).values())
        for tensor in (t for t in held if isinstance(t, torch.Tensor) and t.device.type != "cpu"):
            moved = origin.moved_of(tensor) or origin.born_of(tensor)
            if moved is not None and source.is_user_file(moved.file):
                return source.place(moved.file, moved.line)
        frame = frame.f_back
    return None


_ROWS_ON_CPU = "Keep the rows on the CPU and move the batch in the training loop (or num_workers=0)."


def _in_worker(scene: Scene, file: str, line: int) -> Verdict:
    """A loader's worker touches the GPU: the line that does, else the one of its data set that put the rows there."""
    from torch.utils.data import get_worker_info

    from trimtab.diagnose import rows

    info = get_worker_info()
    method = rows.method_of_rows(info.dataset) if info is not None else None
    function = source.function_at(file, line)
    # A forked worker still has its parent's frames below its own: a loop over the loader is not what it runs.
    loops = isinstance(source.statement(file, line), ast.For) or function is None
    if method is not None and loops and (moved := _move_of_rows(method.file)) is not None:
        why = "the rows are put on the GPU here, and a loader's forked worker may not touch it"
        return _moved_in_loop(scene, method.file, moved, why)
    return _moved_in_loop(scene, file, line, "a loader's worker may not touch the GPU")


def _moved_in_loop(scene: Scene, file: str, line: int, why: str) -> Verdict:
    """What a data set or collator moves, left on the CPU there and moved by the loop that reads the loader."""
    cause, stays = source.cause(file, line, why), _without_move(file, line)
    own = list(source.own_statements(source.function_at(file, line) or ast.Pass()))
    given = [s.value.elts for s in own if isinstance(s, ast.Return) and isinstance(s.value, ast.Tuple)]
    moved = {name for s in own if source.has_move(s) for name in source.bound(s)}
    parts = [source.has_move(p) or bool(source.names_in(p) & moved) for p in (given[0] if given else ())]
    for frame in scene.frames:
        where = frame.f_code.co_filename
        loop = source.statement(where, frame.f_lineno)
        if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Tuple):
            continue
        last = loop.target.elts[-1]
        taken = last.elts if isinstance(last, ast.Tuple) else loop.target.elts  # enumerate(loader)
        known = scope.texts(where, loop.body[0].lineno, frozenset())
        device = next(filter(scope.sounds_like_device, known), None)
        names = [ast.unparse(t) for t, goes in zip(taken, parts, strict=False) if goes]
        if names and device and len(taken) == len(parts):
            text = f"{', '.join(names)} = {', '.join(f'{name}.to({device})' for name in names)}"
            fix = f"Keep the rows on the CPU and move the batch first thing in the loop (line {loop.lineno}): {text}."
            return Verdict(cause, fix, edits=[*stays, rewrite.before(where, loop.body[0], text)])
    return Verdict(cause, _ROWS_ON_CPU, edits=stays)


def _made_before_the_fork(scene: Scene) -> Verdict | None:
    """A worker uses a tensor that its parent put on the GPU: the line that did."""
    for frame in scene.frames[:1]:
        file, line = frame.f_code.co_filename, frame.f_lineno
        for name, tensor in holders.expressions(file, line, frame):
            deed = origin.moved_of(tensor) or origin.born_of(tensor)
            if tensor.device.type == "cuda" and deed is not None and (deed.file, deed.line) != (file, line):
                why = f"{name} is put on the GPU here, and a loader's forked worker may not touch it"
                return Verdict(source.cause(deed.file, deed.line, why), _ROWS_ON_CPU)
    return None


def _without_move(file: str, line: int) -> list[Edit]:
    """The moves of the data set or collator around a line taken away, each a `.to(…)` or `.cuda()` of its own."""
    owner, function = source.class_at(file, line), source.function_at(file, line)
    rows = any(getattr(m, "name", "") in ("__getitem__", "__iter__") for m in getattr(owner, "body", ()))
    around = (owner if rows else function) or ast.Pass()
    moves = [n for n in ast.walk(around) if source.is_move(n)]
    stays = [(m, ast.unparse(m.func.value)) for m in moves if isinstance(m.func, ast.Attribute)]
    return [rewrite.in_place_of(file, move, text) for move, text in stays]


def forked(scene: Scene) -> Verdict | None:
    """A forked process touches the GPU: in a loader's worker that very line, else the line that chose to fork."""
    from torch.utils.data import get_worker_info

    here = scene.fault.frame
    if here is None:
        return None
    if get_worker_info() is not None:
        return _made_before_the_fork(scene) or _in_worker(scene, here.file, here.line)
    starts: list[tuple[int, int]] = []
    for call in source.calls(here.file):
        name = source.called_name(call)
        given = [a.value for a in call.args if isinstance(a, ast.Constant)]
        if name in ("get_context", "set_start_method") and given and given[0] in ("fork", "forkserver"):
            starts.append((0, call.lineno))
        elif name in _FORKING:
            starts.append((_FORKING[name], call.lineno))
    if not starts:
        return None
    why = "the process is forked, after CUDA was initialised in its parent"
    fix = 'start it with torch.multiprocessing.get_context("spawn")'
    return Verdict(source.cause(here.file, min(starts)[1], why), fix)


def no_room(scene: Scene) -> Verdict | None:
    """A GPU that is full: a model that is evaluated with its graph, else the line whose tensors hold most of it."""
    selves = (frame.f_locals.get("self") for frame in scene.frames)
    model = next((one for one in selves if isinstance(one, nn.Module)), None)
    outside = holders.outside(scene.frames)
    if outside is not None and model is not None and not model.training and torch.is_grad_enabled():
        fix, edits = mends_graph.of_evaluation(scene.frames)
        why = "a model in eval mode runs with gradients on: what all its layers give is kept for a backward pass"
        cause = source.cause(outside.f_code.co_filename, outside.f_lineno, why)
        return Verdict(cause, fix, edits=edits)
    if (verdict := _kept_by_a_handler()) is not None:
        return verdict
    full, machine = device_of(scene.fault.message), state.machine()
    used = machine.devices[int(full.removeprefix("cuda:"))].allocated if machine is not None else 0
    told = full_of.gathered_by_trainer(scene, full, used) or full_of.waiting_for_backward(scene)
    told = (
        told or full_of.gathered_by_data_parallel(scene, full, used) or full_of.saved_whole(scene, full, used)
    )
    if told is not None:
        return told
    held: dict[Origin, int] = defaultdict(int)
    seen: set[int] = set()
    for tensor in (t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)):
        # The tensor for which there is no room is only half made: it has no line, and no storage to ask for, yet.
        born = origin.born_of(tensor)
        if born is None or str(tensor.device) != full:
            continue
        if (storage := holders.storage_of(tensor)) not in seen:
            seen.add(storage)
            held[born] += tensor.numel() * tensor.element_size()
    if not held:
        return None
    line, most = max(held.items(), key=lambda pair: pair[1])
    # Of some tensors no line is known (what was read from a file): they are held as well.
    share = most / max(used, sum(held.values()))
    if share < 0.5:
        return None
    why = f"what this line makes is {share:.0%} of all that the tensors on {full} hold"
    return Verdict(source.cause(line.file, line.line, why), full_of.of_attention(line))


def _kept_by_a_handler() -> Verdict | None:
    """A GPU that is full again while the error of the first time is being handled, which holds the failed pass."""
    error = sys.exception()
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = (
            error.__context__
        )  # that there is no room was an error of ours first, raised within the program's
    frame: FrameType | None = sys._getframe(1) if error is not None else None
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if source.is_user_file(file) and _is_handling(file, frame.f_code.co_firstlineno, line):
            why = (
                "this runs inside the handler of the error: until it is left, the error holds the frames of the pass "
                "that failed, and they all that it had computed"
            )
            fix = (
                "Leave the handler first: only note in it that the memory was full, and free what was gathered and "
                "try again behind it."
            )
            return Verdict(source.cause(file, line, why), fix)
        frame = frame.f_back
    return None


def _is_handling(file: str, first: int, line: int) -> bool:
    """Whether a line of the function that begins at `first` stands in an `except` clause."""
    tries = (node for node in source.guarded(file) if isinstance(node, ast.Try) and first <= node.lineno)
    return any(
        handler.body[0].lineno <= line <= (handler.body[-1].end_lineno or 0)
        for node in tries
        for handler in node.handlers
    )


def _move_of_rows(file: str) -> int | None:
    """The first line of a data set (a class with __getitem__ or __iter__) or a collate function that uses a device."""
    collators = source.collators_of(file)
    for node in source.walk(file):
        rows = isinstance(node, ast.ClassDef) and any(
            isinstance(m, source.Function) and m.name in ("__getitem__", "__iter__") for m in node.body
        )
        if rows or (isinstance(node, source.Function) and (node.name in collators or "collate" in node.name)):
            using = [n.lineno for n in ast.walk(node) if source.chooses_device(n)]
            if using:
                return min(using)
    return None


def moved_into(file: str, line: int) -> int | None:
    """What a line iterates over or is given, followed back through its makers' arguments to one that uses a device."""
    node = source.statement(file, line)
    queue = sorted(source.names_in(getattr(node, "iter", None) or node)) if node is not None else []
    seen: set[str] = set()
    while queue and len(seen) < 16:
        name = queue.pop(0)
        if name in seen:
            continue
        seen.add(name)
        made = source.last_assignment(file, line, name)
        value = getattr(made, "value", None)
        if made is None or value is None:
            continue
        if any(source.chooses_device(n) for n in ast.walk(value)):
            return made.lineno
        queue += sorted(source.names_in(value) - seen)
    return None
