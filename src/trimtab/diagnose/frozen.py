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


def condition(place: Place) -> ast.If | None:
    """The `if` over a parameter's name under which a line freezes it."""
    node = source.statement(place.file, place.line)
    above = source.above(place.file, node) if node is not None else ()
    chosen = next((n for n in above if isinstance(n, ast.If)), None)
    return chosen if chosen is not None and any(_words(chosen.test)) else None


def _words(test: ast.expr) -> list[ast.Constant]:
    return [n for n in ast.walk(test) if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value]


def _by_name(place: Place, names: Sequence[str]) -> tuple[str, list[Edit]] | None:
    """All was frozen because no parameter is called what the condition spares."""
    chosen, known = condition(place), [name for name in names if name]
    words = _words(chosen.test) if chosen is not None else []
    if not words or not known or any(str(word.value) in name for word in words for name in known):
        return None
    parts = list(dict.fromkeys(name.split(".")[0] for name in known))
    said = ", ".join(repr(word.value) for word in words)
    fix = f"No parameter is called {said}: the parts of this model are {', '.join(parts)}"
    if len(words) > 1 or len(parts) < 2:
        return f"{fix}.", []
    # What is spared is, as a rule, the head: the part that comes last.
    return f'{fix}. To train the last of them: "{parts[-1]}".', [
        rewrite.in_place_of(place.file, words[0], f'"{parts[-1]}"')
    ]


def loads_adapter(place: Place) -> bool:
    """Whether a line loads an adapter without saying that it is to be trained."""
    calls = [c for c in source.call_on(place.file, place.line) if source.called_name(c) in _LOADS]
    return any(not source.is_constant(source.keyword(call, "is_trainable"), True) for call in calls)


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
            edit = rewrite.add_keyword(place.file, call, "is_trainable", "True")
            return "An adapter is loaded frozen unless it is told otherwise: is_trainable=True.", [edit]
    if (wrong := _by_name(place, names)) is not None:
        return wrong
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
