"""How the rows of a batch are laid for a model: end to end where that is proven sound, else padded.

What the config tells is looked at first, then the loaded model is tried (`proof.py`). It never raises for a model that
it does not know; only packing, which the user asked for, is refused where no way keeps rows apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from trimtab.data.collate import Collate, Layout
from trimtab.errors import RequestError
from trimtab.fast import attention
from trimtab.fast.proof import rows_apart, short_rows, undisturbed
from trimtab.fast.sharing import may_share
from trimtab.placement import bare_model

_MIXERS = re.compile("Mamba|SSM|Rwkv|RWKV|Recurrent|LinearAtt|DeltaNet|ShortConv|Retention|Hyena")
"""In the name of a module's class: tokens meet by a state that runs on from row to row."""
_KINDS = {"full_attention", "sliding_attention"}
"""Kinds of layers that attention over rows can compute."""


@dataclass(frozen=True)
class Laid:
    """How rows are laid, and why not otherwise."""

    layout: Layout
    reason: str
    shares: bool = False
    """Whether what all rows of a batch begin with is computed once."""


@dataclass(frozen=True)
class Means:
    """What the run computes with."""

    device: torch.device
    """Where the model takes its inputs now."""
    gpu: torch.device | None
    """The GPU whose kernels will train it, wherever it lies now; None where there is none."""
    half: torch.dtype | None
    """The half precision that it is computed in, if any."""
    tried: bool = True
    """Whether the model has values that can be tried."""
    rehearsed: bool = False
    """Whether the devices are virtual ones: with values, no kernel for rows runs on them."""

    @property
    def on_gpu(self) -> bool:
        return self.gpu is not None

    def autocast(self) -> AbstractContextManager[Any]:
        # Shapes that wait on the host for their GPU (to be sharded) have no rules of autocast: what is looked at there,
        # how the layers ask for their attention, hangs on no number format.
        waiting = not self.tried and self.device.type == "cpu"
        cast = self.half is not None and self.on_gpu and not waiting
        return torch.autocast(self.device.type, self.half) if cast else nullcontext()


def lay_rows(model: Any, means: Means, *, packing: bool, longest: int, against: str | None = None) -> Laid:
    """Choose the layout for rows of up to `longest` tokens, and make the model's attention fit it. `against`: why not
    end to end, where that was decided before."""
    bare: Any = bare_model(model)
    config = bare.config.get_text_config()
    why = against or _unfit(bare, config, means, longest)
    if why is None:
        own = config._attn_implementation
        if own == "sdpa":
            attention.register()
            bare.set_attn_implementation(attention.NAME)
        why = _seen(bare, config, means, longest, "rows")
        if why is None:
            told = "rows lie end to end, without padding"
            half = means.half is not None or next(bare.parameters()).dtype in attention.FLASH_DTYPES
            hidden = partial(hidden_states, bare)
            if own != "sdpa" or means.on_gpu or not may_share(bare, hidden, means.device, half=half):
                return Laid("rows", told)
            return Laid("rows", f"{told}; what they all begin with is computed once", shares=True)
        if own == "sdpa":
            bare.set_attn_implementation(own)
    if not packing:
        return Laid("padded", f"rows are padded: {why}")
    also = _mixes(bare, config) or (_seen(bare, config, means, longest, "positions") if means.tried else None)
    if also is None:
        return Laid("positions", f"packed rows are told apart by a mask: {why}")
    raise RequestError.of(
        f"data.packing=true with {type(bare).__name__}: rows in one sequence would see each other",
        also,
        "set data.packing=false",
    )


def hidden_states(bare: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The last hidden states, by the model without its head."""
    told: torch.Tensor = bare.base_model(**marked(bare, inputs), use_cache=False).last_hidden_state
    return told


def marked(bare: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs as the model's attention takes them: without a mask to build, where it is ours."""
    config = bare.config.get_text_config()
    if config._attn_implementation != attention.NAME or inputs.get("attention_mask") is not None:
        return dict(inputs)
    return {**inputs, "attention_mask": attention.no_mask(inputs["input_ids"].device)}


def _unfit(bare: Any, config: Any, means: Means, longest: int) -> str | None:
    """What the config and the modules tell against rows laid end to end."""
    how = config._attn_implementation or "eager"
    if means.rehearsed and means.tried:
        return "this is a rehearsal"
    if mixes := _mixes(bare, config):
        return mixes
    if how != "sdpa" and "flash" not in how:
        return f"its attention is {how}"
    if not hasattr(bare, "set_attn_implementation"):
        return "its attention cannot be set"
    if not getattr(config, "is_causal", True):
        return "it looks ahead"
    if getattr(config, "attention_dropout", 0.0) or getattr(config, "attn_pdrop", 0.0):
        return "it drops out attention"
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if (
        how == "sdpa"
        and means.gpu is not None
        and not attention.flash_takes(means.gpu, means.half or torch.float32, head)
    ):
        return f"torch's flash attention does not take its heads of {head} in this precision on this GPU"
    window = (
        getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None) or longest
    )
    kinds = set(getattr(config, "layer_types", None) or ()) - _KINDS
    if kinds and window < longest:
        return f"it has layers of {' and '.join(sorted(kinds))}"
    return None


def _mixes(bare: Any, config: Any) -> str | None:
    found = next(
        (
            type(m).__name__
            for m in bare.modules()
            if _MIXERS.search(type(m).__name__) or isinstance(m, torch.nn.Conv1d)
        ),
        None,
    )
    return None if found is None else f"its tokens meet outside of attention ({found})"


def _seen(bare: Any, config: Any, means: Means, longest: int, layout: Layout) -> str | None:
    """What a trial shows against it. By shapes it shows what the model refuses, and not whether rows meet."""
    rows = short_rows(config)
    collate = Collate(layout, 0)

    def laid(rows: list[list[int]]) -> Mapping[str, Any]:
        batch = collate([{"input_ids": row, "labels": row} for row in rows])
        names = (
            "input_ids",
            "position_ids",
            "cu_seq_lens_q",
            "cu_seq_lens_k",
            "max_length_q",
            "max_length_k",
        )
        return {
            name: value.to(means.device) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
            if name in names
        }

    half = means.half is not None or next(bare.parameters()).dtype in attention.FLASH_DTYPES
    attention.noted = []
    try:
        with undisturbed(bare), means.autocast():
            if means.tried:
                seen = rows_apart(_own_mask(bare), laid, rows, means.device, half=half)
            else:
                seen = None
                hidden_states(bare, laid(rows))
        if seen or layout != "rows":
            return seen
        ours = config._attn_implementation == attention.NAME
        return (_bounds(attention.noted) if ours else None) or _windows(config, attention.noted, longest)
    except torch.OutOfMemoryError:
        raise
    except (
        Exception
    ) as error:  # an architecture of any kind may fail by any error; it is said, and rows are padded
        return (
            f"it cannot take them ({type(error).__name__}: {next(iter(str(error).splitlines()), '')[:120]})"
        )
    finally:
        attention.noted = None


def _bounds(noted: list[attention.Asked]) -> str | None:
    """Where there are shapes alone, this shows what numbers would: a layer that does not know where rows end."""
    if not noted:
        return "its layers do not ask the attention that is set"
    untold = [asked.layer for asked in noted if not asked.bounds]
    return f"layer {untold[0]} does not tell its attention where rows end" if untold else None


def _windows(config: Any, noted: list[attention.Asked], longest: int) -> str | None:
    """Short rows do not meet a long window: that each layer asks for its own must show instead."""
    window = getattr(config, "sliding_window", None)
    if not noted or not window or window >= longest or not getattr(config, "use_sliding_window", True):
        return None
    kinds = getattr(config, "layer_types", None)
    due = {
        layer: window
        if kinds is None or (layer is not None and kinds[layer] == "sliding_attention")
        else None
        for layer, _, _ in noted
    }
    wrong = [asked.layer for asked in noted if asked.window != due[asked.layer]]
    return f"layer {wrong[0]} does not tell its attention the window of {window}" if wrong else None


def _own_mask(bare: Any) -> Callable[[Mapping[str, Any]], torch.Tensor]:
    """Rows alone go by the model's own mask, so that the trial holds ours against it."""

    def hidden(inputs: Mapping[str, Any]) -> torch.Tensor:
        if "position_ids" in inputs:
            return hidden_states(bare, inputs)
        told: torch.Tensor = bare.base_model(**inputs, use_cache=False).last_hidden_state
        return told

    return hidden
