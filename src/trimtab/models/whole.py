"""Whether a model was filled by its files: nothing left to random numbers, and nothing in the files left unread.

Reads the report that the loader gives. What would change the result is refused with the names; what cannot (a buffer
that old versions stored) is said once. It loads nothing.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from trimtab.config.schema import ModelSettings
from trimtab.errors import RequestError, some_of
from trimtab.models.families import Family
from trimtab.placement.stacks import under

_LAYER = re.compile(r"(.*\.)(\d+)\.")
_STORED_BUFFERS = re.compile(
    r"(^|\.)(inv_freq|position_ids|masked_bias|original_inv_freq|num_batches_tracked)$"
)
"""What versions of transformers before this one stored, and this one computes."""
_ADAPTER = re.compile(r"(^|\.)lora_([AB]|embedding_[AB])(\.|$)|^base_model\.model\.")
_SCALES = re.compile(
    r"\.(weight_scale(_inv|_2)?|input_scale|qweight|qzeros|scales|g_idx|absmax|quant_map|weight_packed)(\.|$)"
)


def check_whole(
    settings: ModelSettings,
    model: Any,
    report: Mapping[str, Iterable[Any]],
    family: Family,
    without: Iterable[str] = (),
) -> None:
    """Refuse a model that its files did not fill, or whose files hold more than it takes.

    `without`: parts that the family can do without, and that were taken off.
    """
    misshapen = {key[0] if isinstance(key, tuple) else key for key in report["mismatched_keys"]}
    gone = tuple(without)
    missing = {key for key in report["missing_keys"] if not any(under(key, part) for part in gone)}
    if absent := sorted({*missing, *misshapen}):
        # The loader fills these with random numbers, and goes on.
        raise RequestError.of(
            f"model.name={settings.name}: its weights lack {some_of(absent, 3)}, or have them in another "
            "shape than its config.json says",
            "those tensors would start from random numbers",
            f"give the folder or hub id of a whole {family.name}, with the config.json that belongs to it",
        )
    _check_unread(settings, model, sorted(report["unexpected_keys"]))
    _check_tied(settings, model)


def _check_tied(settings: ModelSettings, model: Any) -> None:
    """Where the config ties two tensors and the files hold two that differ, the loader keeps both; others tie them."""
    wanted = getattr(model, "get_expanded_tied_weights_keys", None)
    kept = getattr(model, "all_tied_weights_keys", None)
    if wanted is None or kept is None:
        return
    for one, other in wanted(all_submodels=True).items():
        if one not in kept:
            raise RequestError.of(
                f"model.name={settings.name}: its config.json ties {one} to {other}, and its weights hold two that "
                "differ",
                "one program would use both and another only one of them: two models under one name",
                "set tie_word_embeddings to false in config.json if both are meant, or remove the one that is not",
            )


def _check_unread(settings: ModelSettings, model: Any, unexpected: list[str]) -> None:
    """The loader leaves out what the model has no place for, and goes on."""
    buffers = {name for name, _ in model.named_buffers()}
    harmless = [name for name in unexpected if name in buffers or _STORED_BUFFERS.search(name)]
    asked = [name for name in unexpected if any(_means(part, name) for part in settings.ignore_weights)]
    if left := [name for name in unexpected if name not in harmless and name not in asked]:
        found, why, change = _unread(model, left)
        raise RequestError.of(f"model.name={settings.name}: {found}", why, change)
    if asked:
        say(f"model.ignore_weights: left out {some_of(asked, 3)} of {settings.name}")
    if harmless:
        say(f"{settings.name}: {some_of(harmless, 3)} of its files is computed, not read, by this version")


def _unread(model: Any, left: list[str]) -> tuple[str, str, str]:
    """What is found, why it cannot work and what to change, for tensors that nothing reads."""
    found = f"its weights hold {some_of(left, 3)}, which {type(model).__name__} has no place for"
    known = {name for name, _ in model.named_modules()}
    parts = ", ".join(dict.fromkeys(_part(known, name) for name in left))
    accept = f"if the model is right without them, set model.ignore_weights=[{parts}]"
    if any(_ADAPTER.search(name) for name in left):
        return (
            found,
            "they are of an adapter, which would be left out",
            ("merge the adapter into its base model, or name the base model itself"),
        )
    if any(_SCALES.search(name) for name in left):
        return (
            found,
            "they are scales of quantised weights, and without them the weights mean something else",
            ("take the unquantised model, or one whose config.json says how it was quantised"),
        )
    beyond = (at for name in left if (at := _LAYER.match(name)) and at[1].rstrip(".") in known)
    if any(at[0].rstrip(".") not in known for at in beyond):
        why = "its config.json says fewer layers than the files hold, and the model would be cut short"
    elif any(name.rpartition(".")[0] in known for name in left):
        why = "the layers that they belong to are there: config.json says that they work without them"
    else:
        why = "config.json is of another model than the weights, or a part is left out that may matter"
    return found, why, f"give the config.json that belongs to the weights; {accept}"


def _means(part: str, name: str) -> bool:
    """Whether a setting names this tensor: by how its name begins, or with `*` for what differs."""
    return under(name, part) or fnmatchcase(name, part)


def _part(known: set[str], name: str) -> str:
    """What a setting has to say to mean this tensor: how its name begins up to where the model has no such part, and
    the same in all layers."""
    parts = name.split(".")
    ends = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    begin = next((begin for begin in ends if begin not in known), name)
    return re.sub(r"\.\d+\.", ".*.", begin)


def say(text: str) -> None:
    """Once, whatever the number of ranks."""
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger(__name__).warning("%s", text)
