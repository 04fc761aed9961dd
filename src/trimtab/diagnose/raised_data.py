"""The line to change for raised errors about data and devices: trainers, columns, rows, device numbers, launchers."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from trimtab.diagnose import holders, source
from trimtab.diagnose.finding import Place
from trimtab.diagnose.raised_common import frames_of, values_named


def trainer_arguments(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """Where the settings that a trainer was given are made."""
    return _trainer_argument(file, own, "args", 1)


def trainer_dataset(file: str, own: Sequence[Place], error: BaseException) -> int | None:
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


def missing_column(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """A collator misses a column that the trainer dropped: the settings of the trainer; else the"
    " failing line."""
    trainers = [value for value in values_named(error, "self") if hasattr(value, "_remove_unused_columns")]
    key = str(error.args[0]) if error.args else ""
    for trainer in trainers:
        columns = getattr(getattr(trainer, "train_dataset", None), "column_names", None) or []
        if key in columns and getattr(trainer.args, "remove_unused_columns", False):
            return trainer_arguments(file, own, error)
    return None


def device_number(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """The line that chose the number of the device."""
    return source.device_choice(file, own[0].line)


def stray_local(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """Among the tensors in the failing call's variables: where the one that stayed on the CPU was made."""
    from trimtab.virtual import origin

    for frame in frames_of(error):
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


def trusted_world_size(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """The line that trusts a launcher's variable."""
    for node in source.walk(file):
        if isinstance(node, ast.Call) and source.called_name(node) in ("get", "getenv"):
            asked = {a.value for a in node.args if isinstance(a, ast.Constant)}
            if asked & {"WORLD_SIZE", "RANK", "LOCAL_RANK"}:
                return node.lineno
    return None


def row_maker(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """Rows that cannot be batched: where the data set, or the program's own collate function, makes them."""
    for fetcher in values_named(error, "self"):
        data = getattr(fetcher, "dataset", None)
        code = getattr(getattr(type(data), "__getitem__", None), "__code__", None)
        if code is None or code.co_filename != file:
            continue
        function = source.function_at(file, code.co_firstlineno)
        returns = [n for n in ast.walk(function) if isinstance(n, ast.Return)] if function else []
        if returns:
            return returns[-1].lineno
    return None


def odd_input(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """Weights and input of different precision: where the input that the failing line names was made."""
    import torch

    for frame in frames_of(error):
        if frame.f_code.co_filename != file:
            continue
        for name, tensor in holders.expressions(file, frame.f_lineno, frame):
            if isinstance(tensor, torch.nn.Parameter) or not tensor.is_floating_point():
                continue
            made = source.last_assignment(file, frame.f_lineno, name.split("[")[0].split(".")[0])
            if made is not None:
                return made.lineno
    return None


def maker(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """Where the object that the failing line calls was made."""
    for call in source.call_on(file, own[0].line):
        name = (
            source.root(call.func) if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        )
        made = source.last_assignment(file, own[0].line, name) if name else None
        if made is not None:
            return made.lineno
    return None


def index_tensor(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """An index out of range: where the whole numbers that the failing line names were made."""
    for frame in frames_of(error):
        if frame.f_code.co_filename != file:
            continue
        for name, tensor in holders.expressions(file, frame.f_lineno, frame):
            if tensor.is_floating_point() or tensor.is_complex():
                continue
            made = source.last_assignment(file, frame.f_lineno, name.split("[")[0].split(".")[0])
            if made is not None and not isinstance(made, ast.For):
                return made.lineno
    return None


def collator_return(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """What the program's own collate function returns."""
    given = [
        value.id
        for node in source.walk(file)
        if isinstance(node, ast.Call)
        for key in ("collate_fn", "data_collator")
        if isinstance(value := source.keyword(node, key), ast.Name)
    ]
    for node in source.walk(file):
        if isinstance(node, ast.FunctionDef) and node.name in given:
            returns = [inner.lineno for inner in ast.walk(node) if isinstance(inner, ast.Return)]
            if returns:
                return max(returns)
    return None


def left_on_meta(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """A load that leaves parameters out, else the line that makes the model without memory."""
    empty = None
    for node in source.walk(file):
        if not isinstance(node, ast.Call):
            continue
        strict = source.keyword(node, "strict")
        if (
            source.called_name(node) == "load_state_dict"
            and isinstance(strict, ast.Constant)
            and not strict.value
        ):
            return node.lineno
        meta = source.called_name(node) == "device" and [getattr(a, "value", "") for a in node.args] == [
            "meta"
        ]
        if meta or source.called_name(node) == "init_empty_weights":
            empty = node.lineno
    return empty
