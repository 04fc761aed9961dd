"""GPUs that need not be here, by the names that people write: for virtual GPUs and for sizing.

What is known of each model is in gpu_models.py. It never looks at this machine, and guesses no model.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab.errors import RequestError
from trimtab.gpu_models import APPLE_GB, APPLE_SHARE, DEFAULT, MODELS, GpuModel
from trimtab.hardware.probe import Accelerator

MOST = 1024
"""More GPUs than this are taken for a slip of the pen."""


_ALIASES = {"H100-80GB": "H100", "H100-SXM": "H100", "H200-SXM": "H200", "H200-141GB": "H200"}


def find_gpu(name: str) -> GpuModel:
    """The model of a loosely written name: `h200`, `A100-40GB`, `rtx4090`, `NVIDIA H200`."""
    wanted = _plain(name)
    known = {_plain(text): model for model in MODELS for text in (model.key, model.name)}
    known |= {_plain(alias): known[_plain(key)] for alias, key in _ALIASES.items()}
    known |= {text.removeprefix("rtx"): model for text, model in known.items()}
    for text in (wanted, f"{wanted}gb"):  # A100-80 is an A100-80GB
        if text in known:
            return known[text]
    begun = sorted({model.key for text, model in known.items() if wanted and text.startswith(wanted)})
    near = begun or sorted(
        {known[text].key for text in difflib.get_close_matches(wanted, known, n=4, cutoff=0.6)}
    )
    all_names = ", ".join(model.key for model in MODELS)
    of_apple = f"of Apple's, in `plan` and `fit`, MPS-{APPLE_GB[0]}GB to MPS-{APPLE_GB[-1]}GB"
    raise RequestError.of(
        f"GPU model {name!r}: "
        + ("more than one has a name like this" if len(begun) > 1 else "not known here"),
        "its memory and abilities come from a catalogue, and nothing is guessed",
        f"use {' or '.join(near)}" if near else f"use one of {all_names}; {of_apple}",
    )


def accelerators(spec: str) -> tuple[Accelerator, ...]:
    """GPUs as a request names them: `2xH200`, `H200`, or `2` (of the default model), all of their memory free."""
    text = spec.strip()
    found = re.fullmatch(r"(?:(\d+)\s*[x×*]\s*)?(\S.*)", text, re.IGNORECASE)
    count, name = (found[1], found[2]) if found else (None, "")
    # A bare number is a count, unless it is the number of a well-known card.
    if count is None and name.isdecimal() and (int(name) <= MOST or len(name) != 4):
        count, name = name, DEFAULT
    number = int(count) if count is not None else 1
    if "," in name:
        raise RequestError.of(
            f"GPUs {spec!r}: several kinds", "the GPUs of one run are of one kind here", "name one: 2xH200"
        )
    if _is_apple(name):
        raise RequestError.of(
            f"GPUs {spec!r}: an Apple GPU",
            "virtual GPUs go by CUDA's rules, and Metal has others",
            f"ask what it would hold: trimtab fit CONFIG --gpu {name}, or trimtab plan CONFIG --gpus {name}",
        )
    if not name or not 1 <= number <= MOST:
        raise RequestError.of(
            f"GPUs {spec!r}: not a number of GPUs",
            f"it is a count from 1 to {MOST}, a model, or both",
            "write 2, H200 or 2xH200",
        )
    return _card(find_gpu(name)).several(number)


def planned_gpus(spec: str) -> tuple[Accelerator, ...]:
    """The same for a plan, which nothing has to run on: one Apple GPU too, by its machine's memory."""
    found = re.fullmatch(r"(?:(\d+)\s*[x×*]\s*)?(mps.*)", spec.strip(), re.IGNORECASE)
    if found is None:
        return accelerators(spec)
    card = _apple(found[2])
    check_one_apple(card, int(found[1] or 1))
    return (card.accelerator,)


def check_one_apple(card: Card, count: int) -> None:
    """Refuse several GPUs of a machine that has one."""
    if card.accelerator.kind != "cuda" and count != 1:
        raise RequestError.of(
            f"{count} × {card.key}", "an Apple GPU is one in its machine", f"use {card.key}"
        )


@dataclass(frozen=True)
class Card:
    """A kind of GPU, by the name that people write."""

    key: str
    accelerator: Accelerator
    """The first of them, all of its memory free."""
    model: GpuModel | None
    """None where too little is published to tell how fast it is: Apple's."""

    def several(self, count: int) -> tuple[Accelerator, ...]:
        return tuple(replace(self.accelerator, name=f"cuda:{index}") for index in range(count))


def cards(names: Sequence[str]) -> list[Card]:
    """The GPUs of these names, each once: `H200`, `MPS-32GB` (an Apple GPU by its machine's memory), `all`."""
    apple = [f"MPS-{size}GB" for size in APPLE_GB]
    asked = [
        key
        for name in names
        for key in ([m.key for m in MODELS] + apple if name.lower() == "all" else [name])
    ]
    found = [_apple(name) if _is_apple(name) else _card(find_gpu(name)) for name in asked]
    return list({card.key: card for card in found}.values())


def _card(model: GpuModel) -> Card:
    gpu = Accelerator(
        name="cuda:0",
        model=model.name,
        total_bytes=model.memory_bytes,
        free_bytes=model.memory_bytes,
        bf16=model.bf16,
        capability=model.capability,
    )
    return Card(model.key, gpu, model)


def _is_apple(name: str) -> bool:
    return name.lower().startswith("mps")


def _apple(name: str) -> Card:
    size = re.fullmatch(r"mps[- ]?(\d+) ?(?:gb)?", name, re.IGNORECASE)
    if size is None or int(size[1]) not in APPLE_GB:
        raise RequestError.of(
            f"GPU {name!r}: not a size that Apple's machines have",
            "an Apple GPU shares its machine's memory, which tells what fits",
            f"use one of {', '.join(f'MPS-{gb}GB' for gb in APPLE_GB)}",
        )
    room = int(int(size[1]) * 2**30 * APPLE_SHARE)
    gpu = Accelerator(name="mps", model="Apple GPU", total_bytes=room, free_bytes=room, bf16=True)
    return Card(f"MPS-{size[1]}GB", gpu, None)


def _plain(name: str) -> str:
    """Letters and digits alone, without the maker's words."""
    words = re.sub(r"\b(nvidia|geforce|tesla|amd|instinct)\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]", "", words)
