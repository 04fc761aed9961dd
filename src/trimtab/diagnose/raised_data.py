"""The line to change for raised errors about data and devices: trainers, columns, rows, device numbers, launchers."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from trimtab.diagnose import source
from trimtab.diagnose.finding import Place
from trimtab.diagnose.raised_common import frames_of, makers_of, values_named
from trimtab.virtual import origin


def trainer_dataset(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """Where the data that a trainer was given is made."""
    return _trainer_argument(file, "train_dataset")


def _trainer_argument(file: str, keyword: str, position: int | None = None) -> int | None:
    for call in (c for c in source.calls(file) if source.called_name(c).endswith("Trainer")):
        given = call.args[position : position + 1] if position is not None else []
        value = source.keyword(call, keyword) or next(iter(given), call)
        made = source.last_assignment(file, call.lineno, value.id) if isinstance(value, ast.Name) else None
        return (made or value).lineno
    return None


def missing_column(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """A collator misses a column that the trainer dropped: the settings of the trainer; else the failing line."""
    trainers = [value for value in values_named(error, "self") if hasattr(value, "_remove_unused_columns")]
    key = str(error.args[0]) if error.args else ""
    for trainer in trainers:
        columns = getattr(getattr(trainer, "train_dataset", None), "column_names", None) or []
        if key in columns and getattr(trainer.args, "remove_unused_columns", False):
            return _trainer_argument(file, "args", 1)
    return None


def device_number(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """The line that chose the number of the device."""
    return source.device_choice(file, own[0].line)


def stray_local(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """Among the tensors in the failing call's variables: where the one that stayed on the CPU was made."""
    for frame in frames_of(error):
        for value in list(frame.f_locals.values()):
            for tensor in value if isinstance(value, tuple | list) else [value]:
                stayed = str(getattr(tensor, "device", "")) == "cpu" and hasattr(tensor, "dtype")
                if stayed and (born := origin.born_of(tensor)) is not None and born.file == file:
                    return born.line
    return None


def trusted_world_size(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """The line that trusts a launcher's variable."""
    for call in source.calls(file, "get", "getenv"):
        if {getattr(a, "value", None) for a in call.args} & {"WORLD_SIZE", "RANK", "LOCAL_RANK"}:
            return call.lineno
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


def maker(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """Where the object that the failing line calls was made."""
    for call in source.call_on(file, own[0].line):
        name = source.root(call.func)
        made = source.last_assignment(file, own[0].line, name) if name else None
        if made is not None:
            return made.lineno
    return None


def index_tensor(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """An index out of range: where the whole numbers that the failing line names were made."""
    indices = makers_of(file, error, lambda t: not t.is_floating_point() and not t.is_complex())
    return next((made.lineno for made in indices if not isinstance(made, ast.For)), None)


def collator_return(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """What the program's own collate function returns."""
    collators = source.collators_of(file)
    for node in source.walk(file):
        if isinstance(node, ast.FunctionDef) and node.name in collators:
            returns = [inner.lineno for inner in ast.walk(node) if isinstance(inner, ast.Return)]
            if returns:
                return max(returns)
    return None


def left_on_meta(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """A load that leaves parameters out, else the line that makes the model without memory."""
    for call in source.calls(file, "load_state_dict"):
        if source.is_constant(source.keyword(call, "strict"), False):
            return call.lineno
    makers = [call for call in source.calls(file, "device", "init_empty_weights") if _makes_empty(call)]
    return makers[-1].lineno if makers else None


def _makes_empty(call: ast.Call) -> bool:
    on_meta = [getattr(argument, "value", "") for argument in call.args] == ["meta"]
    return on_meta or source.called_name(call) == "init_empty_weights"
