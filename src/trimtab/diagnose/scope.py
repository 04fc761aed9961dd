"""What can be written at a line of the program: which names are bound there, and which of its own expressions gives a
device. Proves that a fix would run in its place; writes none.

Values are looked at where the function still runs; elsewhere the words that the program itself uses for a device in
that scope are trusted, unless it uses several GPUs.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from trimtab.diagnose import holders, source
from trimtab.virtual import origin

_WORD = re.compile(r"(^|_)(dev|device|gpu)(_?id)?\d*$", re.IGNORECASE)
_HOLDERS = re.compile(r"^(self|args?|cfg|conf|config|opts?|hparams|settings|accelerator|fabric|trainer)$")
"""Names that mean the same object wherever a program uses them."""
_HELPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers")


def is_bound(file: str, line: int, name: str) -> bool:
    """Whether a name has a value when the statement on a line runs: bound before it, a parameter, or of the module."""
    function = source.function_at(file, line)
    if function is not None:
        inside = _bindings(function, name)
        if name in _arguments(function) or any(at < line for at in inside):
            return True
        if inside:
            return False  # a local name that gets its value later
        for outer in source.above(file, function):
            if isinstance(outer, source.Function) and (
                name in _arguments(outer) or any(at < function.lineno for at in _bindings(outer, name))
            ):
                return True
    module = source.tree(file)
    found = _bindings(module, name) if module is not None else []
    if function is not None:
        # Another file that imports this one never runs what stands under `if __name__ == "__main__"`.
        return any(not _as_script(file, at) for at in found)
    return any(at < line for at in found)


def _as_script(file: str, line: int) -> bool:
    around = source.above(file, source.statement(file, line) or ast.Pass())
    return any(isinstance(n, ast.If) and "__name__" in source.names_in(n.test) for n in around)


def _arguments(function: source.Function) -> list[str]:
    args = function.args
    return [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg) if a]


def _bindings(scope: ast.AST, name: str) -> list[int]:
    """The lines of a scope at which a name gets a value."""
    found = []
    for node in source.own_statements(scope):
        if name in source.bound(node) or name == getattr(node, "name", None):
            found.append(node.lineno)
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [node.lineno for a in node.names if name == (a.asname or a.name.partition(".")[0])]
    return found


def device_at(
    frames: list[FrameType],
    file: str,
    line: int,
    wanted: str,
    several: bool = False,
    wrong: frozenset[str] = frozenset(),
) -> str | None:
    """An expression of the program's own that gives the wanted device where the statement on a line runs.

    `several`: the program uses more GPUs than one, so that a word alone proves nothing. `wrong`: what is known to give
    another device.
    """
    frame = frame_of(frames, file, line)
    return (
        device_near(frames, file, line, wanted, several, wrong)
        or _own_weights(frames, file, line, wanted)
        or _first_meaning(_texts(file, line, wrong), frames, file, line, wanted, several)
        or (_beside(frame, file, line, wanted) if frame is not None else None)
        or _spelled(file, line, wanted)
    )


def device_near(
    frames: list[FrameType], file: str, line: int, wanted: str, several: bool, wrong: frozenset[str]
) -> str | None:
    """The same of what the function around a line itself knows: its names, its object, what it was given."""
    frame = frame_of(frames, file, line)
    return _first_meaning(_texts(file, line, wrong, _GLOBAL), frames, file, line, wanted, several) or (
        _given_tensor(frame, file, line, wanted) if frame is not None else None
    )


def _texts(file: str, line: int, wrong: frozenset[str], below: int = 9) -> list[str]:
    """What the program writes for a device and can write on a line, the nearest first."""
    found: dict[str, int] = {}
    for text, rank in _said(file, line):
        found[text] = min(rank, found.get(text, rank))
    near = [text for text, rank in found.items() if rank < below and text not in wrong]
    return sorted(near, key=lambda text: (found[text], _plainness(text), len(text)))


_GLOBAL = 2
"""How far a name stands that only the module knows."""


def _first_meaning(
    texts: list[str], frames: list[FrameType], file: str, line: int, wanted: str, several: bool
) -> str | None:
    """The first of these expressions that gives the device, as far as a running function shows."""
    frame = frame_of(frames, file, line)
    for text in texts:
        seen = frame or _witness(frames, file, line, text)
        value = _value(ast.parse(text, mode="eval").body, seen) if seen is not None else None
        if means(value, wanted) or (value is None and not several and sounds_like_device(text)):
            return text
    return None


def _given_tensor(frame: FrameType, file: str, line: int, wanted: str) -> str | None:
    """The device of a tensor, or else of a model, that the running function was given."""
    given = [(name, frame.f_locals.get(name)) for name in source.parameters(file, line)]
    for known in (given, [entry for name, value in given for entry in _entries(name, value)]):
        texts = [text for name, value in known if (text := device_of(name, value, file, line, wanted))]
        if texts:
            return min(texts, key=len)
    return None


def _entries(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors in a dict, list or tuple, each with the code that takes it out."""
    pairs = (
        value.items() if type(value) is dict else enumerate(value) if isinstance(value, list | tuple) else ()
    )
    for key, entry in itertools.islice(pairs, 16):
        if isinstance(entry, torch.Tensor) and isinstance(key, str | int):
            yield (f'{name}["{key}"]' if isinstance(key, str) else f"{name}[{key}]"), entry


def device_of(name: str, value: Any, file: str, line: int, wanted: str) -> str | None:
    """Code for the device of a tensor or model, if that is the wanted one, and was so already on a line."""
    if isinstance(value, torch.Tensor) and str(value.device) == wanted:
        return f"{name}.device"
    first = next(value.parameters(), None) if isinstance(value, nn.Module) else None
    if first is None or str(first.device) != wanted:
        return None
    moved = origin.moved_of(first)
    late = moved is not None and moved.file == file and moved.line >= line
    here = moved is not None and source.function_at(file, moved.line) is source.function_at(file, line)
    return None if late and here else f"next({name}.parameters()).device"


def _own_weights(frames: list[FrameType], file: str, line: int, wanted: str) -> str | None:
    """The device of the module whose method holds a line, if one of its class runs and has its weights there."""
    function, owner = source.function_at(file, line), source.class_at(file, line)
    if function is None or owner is None or function.name == "__init__":
        return None
    if [a.arg for a in function.args.args[:1]] != ["self"]:
        return None
    for frame in frames:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and holders.source_of(module) == (file, owner.name):
            first = next(module.parameters(), None)
            if first is not None and str(first.device) == wanted:
                return "next(self.parameters()).device"
    return None


def _spelled(file: str, line: int, wanted: str) -> str | None:
    """The device in words, in a script that spells it out in every place and has no name for it."""
    if source.function_at(file, line) is not None:
        return None
    texts = {text for node in source.walk(file) for text in _device_texts(node)}
    words = [w for node in source.walk(file) if isinstance(node, ast.Call) for w in _device_words(node)]
    if any(sounds_like_device(text) for text in texts):
        return None
    return next((f'"{word}"' for word in words if means(word, wanted)), None)


def _device_words(call: ast.Call) -> Iterator[str]:
    """The devices that a call spells out: `"cuda:1"`, and "cuda" of `.cuda()`."""
    move = source.is_move(call)
    if move and source.called_name(call) == "cuda" and not call.args and not call.keywords:
        yield "cuda"
    given = [*(call.args[:1] if move else ()), source.keyword(call, "device")]
    yield from (g.value for g in given if isinstance(g, ast.Constant) and isinstance(g.value, str))


def _beside(frame: FrameType, file: str, line: int, wanted: str) -> str | None:
    """A model or tensor of the running function on that device, which got its only value before a line."""
    for name, value in list(frame.f_locals.items()):
        made = source.assignments(file, line, name)
        if len(made) != 1 or made[0].lineno >= line or hasattr(made[0], "body"):
            continue
        if text := device_of(name, value, file, line, wanted):
            return text
    return None


def frame_of(frames: list[FrameType], file: str, line: int) -> FrameType | None:
    """The live frame of the function that holds a line."""
    function = source.function_at(file, line)
    for frame in frames:
        here = frame.f_code.co_filename == file and source.function_at(file, frame.f_lineno) is function
        if here and (function is not None or frame.f_code.co_name == "<module>"):
            return frame
    return None


def _witness(frames: list[FrameType], file: str, line: int, text: str) -> FrameType | None:
    """A running function that sees what an ended one saw: the same `self`, or the same module's names."""
    function, owner = source.function_at(file, line), source.class_at(file, line)
    root = text.split(".")[0].split("[")[0]
    for frame in frames:
        if root == "self":
            named = holders.source_of(frame.f_locals.get("self"))
            if owner is not None and named == (file, owner.name):
                return frame
        elif frame.f_code.co_filename == file and root in frame.f_globals and root not in frame.f_locals:
            local = function is not None and (root in _arguments(function) or _bindings(function, root))
            if not local:
                return frame
    return None


def means(value: Any, wanted: str) -> bool:
    """Whether a value names a device (`cuda` without a number means the present one)."""
    if isinstance(value, bool) or not isinstance(value, str | int | torch.device):
        return False
    try:
        device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
    except RuntimeError:
        return False
    if device.type == "cuda" and device.index is None:
        return wanted == f"cuda:{torch.cuda.current_device()}"
    return str(device) == wanted


def _said(file: str, line: int) -> Iterator[tuple[str, int]]:
    """What the program writes for a device and can be written on a line too, each with how near it stands."""
    function, owner = source.function_at(file, line), source.class_at(file, line)
    for node in source.walk(file):
        for text in _device_texts(node):
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
            yield text, 0 if near else 1 if root == "self" else _GLOBAL
    yield from ((text, 1) for text in _helpers(file, line))
    if function is not None:
        yield from ((name, 0) for name in _arguments(function) if _WORD.search(name))
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


def _device_texts(node: ast.AST) -> Iterator[str]:
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


def _value(node: ast.expr, frame: FrameType) -> Any:
    """What an expression for a device stands for; None where that would have to be computed."""
    if isinstance(node, ast.Attribute) and node.attr == "device":
        owner = holders.value_of(node.value, frame)
        if isinstance(owner, torch.Tensor):
            return owner.device
        if owner is not None and type(owner).__module__.partition(".")[0] in _HELPERS:
            return owner.device
    return holders.value_of(node, frame)
