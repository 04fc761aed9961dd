"""The rows that a loader hands out: the data set and collator behind a traceback, and the lines that make them.

Looks at live objects of the failing frames and reads source; fetches no row and changes nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from trimtab.diagnose import source
from trimtab.diagnose.finding import Place
from trimtab.diagnose.raised_common import known_here, own_frames, values_named

LABELS = ("labels", "label", "y", "target", "targets")


def data_sets(error: BaseException) -> Iterator[Any]:
    """The data sets in reach of a traceback: of a trainer, a loader's fetcher, a loader in the user's variables."""
    for owner in values_named(error, "self"):
        for name in ("train_dataset", "dataset", "_dataset"):
            if (data := vars(owner).get(name) if hasattr(owner, "__dict__") else None) is not None:
                yield data
    for _, _, loader in known_here(error, lambda value: isinstance(value, DataLoader)):
        yield loader.dataset


def method_of_rows(data: Any) -> Place | None:
    """The user's own method that gives a row of a data set; of a part of another one, of that one."""
    while not _own_code(data) and hasattr(data, "dataset"):
        data = data.dataset
    code = _own_code(data)
    return Place(code.co_filename, code.co_firstlineno) if code is not None else None


def _own_code(data: Any) -> Any:
    for name in ("__getitem__", "__iter__"):
        code = getattr(getattr(type(data), name, None), "__code__", None)
        if code is not None and source.is_user_file(code.co_filename):
            return code
    return None


def label_line(error: BaseException) -> Place | None:
    """The line at which the user's data set puts the label into a row."""
    methods = [method for data in data_sets(error) if (method := method_of_rows(data)) is not None]
    lines = (label_line_of(method) for method in methods)
    return next((line for line in lines if line is not None), None if methods else _label_of_only_rows(error))


def _label_of_only_rows(error: BaseException) -> Place | None:
    """Of a loader that no variable holds any more: the label in the only place of the failing files that makes rows, a
    class with __getitem__ or a TensorDataset (whose last tensor is the label)."""
    found: list[Place | None] = []
    for file in dict.fromkeys(frame.f_code.co_filename for frame, _ in own_frames(error)):
        owners = [node for node in source.walk(file) if isinstance(node, ast.ClassDef)]
        methods = [
            m for o in owners for m in o.body if isinstance(m, source.Function) and m.name == "__getitem__"
        ]
        found += [label_line_of(source.place(file, method.lineno)) for method in methods]
        for call in source.calls(file, "TensorDataset"):
            if len(call.args) > 1:
                found.append(source.place(file, _set(file, call.args[-1]).lineno))
    return found[0] if len(found) == 1 else None


def label_line_of(method: Place) -> Place | None:
    """The line at which a method that gives rows puts the label into one."""
    function = source.function_at(method.file, method.line)
    for node in ast.walk(function) if function is not None else ():
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value in LABELS:
                    return source.place(method.file, _set(method.file, value).lineno)
    returns = [n for n in ast.walk(function) if isinstance(n, ast.Return)] if function else []
    if returns and isinstance(returns[-1].value, ast.Tuple):
        return source.place(method.file, _set(method.file, returns[-1].value.elts[-1]).lineno)
    return None


def _set(file: str, value: ast.expr) -> ast.expr:
    """What a name that stands for a label was last given, in the function that gives the row; else the value itself."""
    made = source.last_assignment(file, value.lineno, value.id) if isinstance(value, ast.Name) else None
    if not isinstance(made, ast.Assign):
        return value
    given = source.value_for(made, value.id) if isinstance(value, ast.Name) else None
    return value if given is None or any(isinstance(t, ast.Tuple) for t in made.targets) else given


def label_value(place: Place) -> ast.expr | None:
    """The expression of the label on the line that puts it into a row."""
    function = source.function_at(place.file, place.line)
    for node in ast.walk(function) if function is not None else ():
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                named = isinstance(key, ast.Constant) and key.value in LABELS
                if named and (given := _set(place.file, value)).lineno == place.line:
                    return given
        last = (
            node.value.elts[-1]
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)
            else None
        )
        if last is not None and (given := _set(place.file, last)).lineno == place.line:
            return given
    return None
