"""How the names in a saved state are made those of the model that is to load it. Reads source, runs nothing."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import torch

from trimtab.diagnose import rewrite, source
from trimtab.diagnose.finding import Edit, Place

Mend = tuple[str, str, list[Edit]]
"""Why the names differ, how that is mended, and the edits."""


def renamed(
    place: Place, state: Mapping[str, Any], own: Mapping[str, torch.Tensor], wrapped: bool
) -> Mend | None:
    """The one change of names after which at least half of either side fits, in name and shape; None without one."""
    calls = [c for c in source.call_on(place.file, place.line) if source.called_name(c) == "load_state_dict"]
    call = calls[0] if len(calls) == 1 and isinstance(calls[0].func, ast.Attribute) else None
    given = (source.keyword(call, "state_dict") or next(iter(call.args), None)) if call is not None else None
    text = rewrite.text_of(place.file, given) if given is not None else "the state"
    inner = next((k for k, v in state.items() if isinstance(v, Mapping) and _fit("", v, own)), None)
    if inner is not None:
        why = f"the weights are under {inner!r} in what is loaded"
        code, target = f"{text}[{inner!r}]", given
    elif prefix := _prefix(state, own):
        why = f"the names in what is loaded begin with {prefix!r}, those of the model do not"
        code, target = f"{{k.removeprefix({prefix!r}): v for k, v in {text}.items()}}", given
    elif prefix := _prefix(own, state):
        why = f"the names of the model begin with {prefix!r}, those in what is loaded do not"
        code, target = f"{{{prefix!r} + k: v for k, v in {text}.items()}}", given
        if wrapped and prefix == "module." and call is not None and isinstance(call.func, ast.Attribute):
            code, target = f"{rewrite.text_of(place.file, call.func.value)}.module", call.func.value
    else:
        return None
    said = f"Load {code}" if target is given else f"Load it into {code}"
    return why, said, [rewrite.in_place_of(place.file, target, code)] if target is not None else []


def _prefix(long: Mapping[str, Any], short: Mapping[str, Any]) -> str:
    """What names on one side begin with, and the other side's do not; empty where not just one makes them fit."""
    known: set[str] = set()
    names = set(short)
    for key in list(long)[:500]:
        parts = key.split(".")
        for n in range(1, len(parts)):
            if ".".join(parts[n:]) in names:
                known.add(".".join(parts[:n]) + ".")
                break
    fitting = [prefix for prefix in known if _fit(prefix, long, short)]
    return fitting[0] if len(fitting) == 1 else ""


def _fit(prefix: str, long: Mapping[str, Any], short: Mapping[str, Any]) -> bool:
    same = [key for key in short if _shape(long.get(prefix + key)) == _shape(short[key]) is not None]
    return bool(same) and 2 * len(same) >= min(len(long), len(short))


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
