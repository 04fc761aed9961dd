"""Where text and sound stand in a batch of a voice, numbered on the CPU: so that no layer has to ask the device.

A layer of Higgs Audio sends text and sound through MLPs of their own and finds them by masks; a GPU that takes the
elements of a mask waits to be told how many they are, a dozen times a layer and pass. The collator knows the batch
before it is on the device. `PlacedVoices` adds the numbers to its batches, and `PlacedLayer` computes the same by them;
without them it is transformers' own layer. Never changes a weight, its name or a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import masking_utils
from transformers.models.higgs_audio_v2.modeling_higgs_audio_v2 import HiggsAudioV2DecoderLayer as Layer

from trimtab.data.render import IGNORED

PLACES = "places"
"""The entry of a batch that has them, and the argument of a layer."""
_PACKED = "find_packed_sequence_indices"
Batch = dict[str, Any]


class Parted(NamedTuple):
    """The positions of all rows, one after the other, as a layer parts them."""

    order: torch.Tensor
    """(B · L) the text's positions, then the sound's."""
    inverse: torch.Tensor
    """(B · L) where each position went."""
    text: torch.Tensor
    """(T) the text's; its length alone is used."""


def targets_of(batch: Any, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What the positions of each row but the last have to tell: tokens (B, L-1) and codes (B, L-1, K); else -100."""
    ids = batch["input_ids"]
    labels, frames = batch.get("labels"), batch.get("audio_labels")
    text = torch.full_like(ids, IGNORED) if labels is None else labels.to(ids.device)
    codes = ids.new_full((*ids.shape, config.num_codebooks), IGNORED)
    if frames is not None:
        real = batch.get("audio_input_ids_mask")
        frames = frames.to(ids.device)
        sound = _is_sound(ids, config)
        codes[sound] = frames.flatten(0, 1) if real is None else frames[real.to(ids.device, torch.bool)]
    return text[:, 1:], codes[:, 1:]


def with_places(batch: Mapping[str, Any], config: Any) -> Batch:
    """The batch, on the CPU, with its places; and without a mask that only hides padding behind every row.

    A causal model tells nothing of what comes later, so padding behind a row changes none of its positions.
    """
    made = dict(batch)
    ids = made["input_ids"]
    text, codes = (_to_the_end(part) for part in targets_of(made, config))
    told, heard = text.ne(IGNORED).flatten(), codes.ne(IGNORED).any(-1).flatten()
    sound = _is_sound(ids, config).flatten()
    order = torch.cat([_where(~sound), _where(sound)])
    made[PLACES] = {
        "order": order,
        "inverse": torch.empty_like(order).scatter_(0, order, torch.arange(len(order))),
        "text": _where(~sound),
        "told": _where(told),
        "words": text.flatten()[told],
        "heard": _where(heard),
        "sounds": codes.flatten(0, 1)[heard],
    }
    if made.get("audio_input_ids_mask") is not None:
        made[PLACES]["frames"] = _where(made["audio_input_ids_mask"].flatten())
    mask = made.get("attention_mask")
    if mask is not None and mask.dim() == 2 and not bool((mask[:, 1:] > mask[:, :-1]).any()):
        del made["attention_mask"]
    return made


class PlacedVoices:
    """A collator's batches with their places."""

    def __init__(self, collate: Callable[[Sequence[Any]], Mapping[str, Any]], config: Any) -> None:
        """`config`: the model's."""
        self.collate, self._config = collate, config

    def __call__(self, rows: Sequence[Any]) -> Batch:
        return with_places(self.collate(rows), self._config)


def by_places(batch: Mapping[str, Any]) -> tuple[Batch, Parted]:
    """What the model's body is given of a batch with places: codes of real frames alone, in the order of the text."""
    places = batch[PLACES]
    inputs = {name: value for name, value in batch.items() if name != PLACES}
    frames = places.get("frames")
    if frames is not None and inputs.get("audio_input_ids") is not None:
        inputs["audio_input_ids"] = inputs["audio_input_ids"].flatten(0, 1).index_select(0, frames)[None]
        inputs.pop("audio_input_ids_mask")
    return inputs, Parted(places["order"], places["inverse"], places["text"])


@contextmanager
def rows_unpacked() -> Iterator[None]:
    """While a batch of the collator, of one conversation a row, goes through a model.

    Without a mask transformers asks the device in each pass whether places begin anew inside a row.
    """
    own = getattr(masking_utils, _PACKED, None)
    if own is None:
        yield
        return
    setattr(masking_utils, _PACKED, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masking_utils, _PACKED, own)


class HiggsAudioV2DecoderLayer(Layer):
    """By places where it is given some. It has the name of the class that it extends: splits and shards go by it."""

    def forward(self, *args: Any, places: Parted | None = None, **kwargs: Any) -> torch.Tensor:
        if places is None or len(args) != 1 or kwargs.get("audio_token_mask") is None:
            return super().forward(*args, **kwargs)
        hidden: torch.Tensor = args[0]
        sound = kwargs.pop("audio_token_mask")[..., None].to(hidden.device)
        normed = torch.where(sound, self.audio_input_layernorm(hidden), self.input_layernorm(hidden))
        attended, _ = self.self_attn(hidden_states=normed, **kwargs)
        between = hidden + attended
        normed = torch.where(
            sound, self.audio_post_attention_layernorm(between), self.post_attention_layernorm(between)
        )
        return torch.add(between, _by_kind(self, normed, places))


PlacedLayer = HiggsAudioV2DecoderLayer


def _by_kind(layer: Any, hidden: torch.Tensor, places: Parted) -> torch.Tensor:
    """Each position through the MLP of its kind."""
    sorted_ = _Reordered.apply(hidden.flatten(0, 1), places.order, places.inverse)
    count = places.text.shape[0]
    made = torch.cat([layer.mlp(sorted_[:count]), layer.audio_mlp(sorted_[count:])])
    back: torch.Tensor = _Reordered.apply(made, places.inverse, places.order)
    return back.view(hidden.shape)


class _Reordered(torch.autograd.Function):
    """Rows in another order; the gradient takes the way back, as a gather too and not as a sum."""

    @staticmethod
    def forward(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = rows.index_select(0, order)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse), None, None


def _is_sound(ids: torch.Tensor, config: Any) -> torch.Tensor:
    sound: torch.Tensor = (ids == config.audio_token_id) | (ids == config.audio_delay_token_id)
    return sound


def _to_the_end(targets: torch.Tensor) -> torch.Tensor:
    """A last position more in each row, that tells nothing."""
    none = targets.new_full((len(targets), 1, *targets.shape[2:]), IGNORED)
    return torch.cat([targets, none], 1)


def _where(mask: torch.Tensor) -> torch.Tensor:
    return mask.nonzero().flatten()
