"""Adapters that a library loaded frozen, and an optimizer that therefore gets nothing: the line that loaded them.

Looks at the models that the failing functions know; speaks only where none of a model's parameters is trainable.
"""

from __future__ import annotations

import ast

from torch import nn

from trimtab.diagnose import frozen, source
from trimtab.diagnose.finding import Place, cause_at
from trimtab.diagnose.raised_common import known_here
from trimtab.diagnose.raised_graph import freezes_on
from trimtab.diagnose.rules_common import Verdict
from trimtab.virtual import origin


def loaded_frozen(error: BaseException) -> Verdict | None:
    """A model whose adapters were loaded for inference, as PEFT does unless it is told otherwise."""
    for frame, _, model in known_here(
        error, lambda value: isinstance(value, nn.Module) and _has_adapters(value)
    ):
        if any(parameter.requires_grad for parameter in model.parameters()):
            continue
        born = {origin.born_of(p) for name, p in model.named_parameters() if _of_adapter(model, name)} - {
            None
        }
        places = {source.place(made.file, made.line) for made in born if made is not None}
        # Weights that a library makes in threads of its own know no line: the only one that loads an adapter, then.
        loading = [one for one in places or _loading(frame.f_code.co_filename) if frozen.loads_adapter(one)]
        if len(loading) != 1 or len(places) > 1:
            continue
        place = loading[0]
        if any(freezes_on(n) and n.lineno > place.line for n in _beside(place.file, place.line)):
            continue
        fix, edits = frozen.mend(place, [])
        why = "this loads the adapter frozen: no parameter of the model is trainable"
        return Verdict(cause_at(place, why), fix, edits=edits)
    return None


def _has_adapters(model: nn.Module) -> bool:
    return isinstance(vars(model).get("peft_config"), dict)


def _of_adapter(model: nn.Module, name: str) -> bool:
    """By PEFT's way of naming: `…lora_A.default.weight` for the adapter "default"."""
    known = vars(model).get("peft_config")
    return isinstance(known, dict) and not set(known).isdisjoint(name.split("."))


def _loading(file: str) -> set[Place]:
    """The lines of a file that load adapters."""
    calls = source.calls(file, "load_adapter", "from_pretrained")
    return {
        source.place(file, c.lineno)
        for c in calls
        if "Peft" in (text := ast.unparse(c.func)) or "load_a" in text
    }


def _beside(file: str, line: int) -> list[ast.stmt]:
    """The statements of the function around a line, or of the module."""
    scope = source.function_at(file, line) or source.tree(file)
    return source.own_statements(scope) if scope is not None else []
