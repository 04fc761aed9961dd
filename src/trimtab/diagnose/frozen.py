"""How parameters that were frozen by the line in question are made trainable again. Reads source, runs nothing."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from trimtab.diagnose import rewrite, source
from trimtab.diagnose.finding import Edit, Place

_LOADS = frozenset(("from_pretrained", "load_adapter"))


def said_by(place: Place) -> Place:
    """The setting behind a line that froze parameters: a config's inference_mode=True, else the line itself."""
    if not any(
        source.called_name(call) == "get_peft_model" for call in source.call_on(place.file, place.line)
    ):
        return place
    for call in source.calls(place.file):
        for given in (k for k in call.keywords if k.arg == "inference_mode"):
            if source.is_constant(given.value, True):
                return source.place(place.file, given.value.lineno)
    return place


def mend(place: Place, names: Sequence[str]) -> tuple[str, list[Edit]]:
    """What to write instead on a line that froze parameters of these names."""
    calls = list(source.call_on(place.file, place.line))
    for call in calls:
        for given in (k for k in call.keywords if k.arg == "inference_mode"):
            if source.is_constant(given.value, True):
                edits = [rewrite.in_place_of(place.file, given.value, "False")]
                return "Adapters of this config are frozen: inference_mode=False.", edits
    for call in (c for c in calls if source.called_name(c) in _LOADS):
        if not source.is_constant(source.keyword(call, "is_trainable"), True):
            old = source.keyword(call, "is_trainable")
            edit = (
                rewrite.in_place_of(place.file, old, "True")
                if old is not None
                else rewrite.add_keyword(place.file, call, "is_trainable", "True")
            )
            return "An adapter is loaded frozen unless it is told otherwise: is_trainable=True.", [edit]
    adapters = [name for name in names if "lora_" in name or "adapter" in name]
    node = source.statement(place.file, place.line)
    if adapters and isinstance(node, ast.Assign):
        return (
            "Freeze the base before the adapters are added, or leave them out here: parameter.requires_grad = "
            '"lora_" in name, over model.named_parameters().',
            [],
        )
    if adapters:
        return "Freeze the base before the adapters are added, or switch them on again after this line.", []
    return (
        "Leave the parameters that are to be trained out of this, or set their requires_grad to True after it.",
        [],
    )
