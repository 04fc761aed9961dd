"""The loss of a voice: text cross-entropy plus the mean over codebooks of the audio's, each a mean over its own tokens.

Only the hidden states that tell a trained token go through the heads: with a few trained words after a clip there are
never logits over the vocabulary for every position. A frame's codes are told by the position before it in its own row,
as transformers shifts labels; a clip's first column is never trained, so nothing is told across clips. Computed in fp32
at least, and given back on the device of the input, wherever the heads are. It never changes a weight or its name, and
without labels the model is transformers' own.
"""

from __future__ import annotations

import functools
import inspect
import types
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.nn import functional as F
from transformers.utils import ModelOutput

from trimtab.data.render import IGNORED
from trimtab.errors import RequestError
from trimtab.models.voice_places import PLACES, PlacedLayer, by_places, rows_unpacked, targets_of

Model = transformers.HiggsAudioV2ForConditionalGeneration
_SIGNATURE = inspect.signature(Model.forward)


@dataclass
class VoiceOutput(ModelOutput):
    """What a batch with labels gives. Place 0 is the text's, the others are the codebooks'."""

    loss: torch.Tensor | None = None
    """Of this batch by itself; a step of several batches weighs `sums` by the counts of them all."""
    sums: torch.Tensor | None = None
    """(1 + K): summed cross-entropies; nought, and still a part of the graph, where nothing is trained."""
    counts: torch.Tensor | None = None
    """(1 + K): trained tokens."""


class HiggsAudioV2ForConditionalGeneration(Model):
    """With our loss. It has the name of the class that it extends: `save_pretrained` writes that into config.json."""

    # The trainer's one count of labels means nothing to a loss of several parts.
    accepts_loss_kwargs = False

    @functools.wraps(Model.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        given = _SIGNATURE.bind(self, *args, **kwargs).arguments
        if given.get("labels") is None and given.get("audio_labels") is None:
            return super().forward(*args, **kwargs)
        return _taught(self, given)


def teach_voice(model: Any) -> None:
    """Have `model` compute this loss when it is called with labels. Before adapters or a wrapper are put around it."""
    if isinstance(model, HiggsAudioV2ForConditionalGeneration):
        return
    if type(model) is not Model:
        raise RequestError.of(
            f"{type(model).__name__} is to learn a voice",
            f"this loss reads the codes and heads of {Model.__name__}",
            "choose a Higgs Audio v2 model",
        )
    ours = HiggsAudioV2ForConditionalGeneration
    _becomes(model, ours)
    model.model.embed_audio_tokens.register_forward_hook(_as_text_embeds)
    for layer in model.model.layers:
        _becomes(layer, PlacedLayer)


def _becomes(module: Any, ours: Any) -> None:
    """Of its class's extension, with all that it holds."""
    module.__class__ = ours
    if "_old_forward" in vars(module):
        # Of a model that is split: accelerate's hook calls the forward that it found.
        setattr(module, "_old_forward", types.MethodType(ours.forward, module))  # noqa: B010


def _as_text_embeds(embeddings: Any, args: Any, embedded: torch.Tensor) -> torch.Tensor:
    """Autocast adds up a frame's codes in fp32, and the model puts them between text of its weights' format as is."""
    return embedded.to(embeddings.embed_audio_tokens.weight.dtype)


def parts_of(sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """(1 + K) means; nought for a part without a trained token."""
    return sums / counts.clamp(min=1)


def whole_of(parts: torch.Tensor) -> torch.Tensor:
    """The loss: the text's part plus the mean of the codebooks'."""
    return parts[0] + parts[1:].mean()


def count_trained(batch: Any, config: Any) -> torch.Tensor:
    """(1 + K) trained tokens of a batch, on its device."""
    places = batch.get(PLACES)
    return _counted(*(targets_of(batch, config) if places is None else (places["words"], places["sounds"])))


def _counted(text: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return torch.cat([text.ne(IGNORED).sum().view(1), codes.ne(IGNORED).flatten(0, -2).sum(0)])


def _taught(model: Any, given: dict[str, Any]) -> VoiceOutput:
    batch = {name: value for name, value in given.items() if name not in ("self", "kwargs")}
    batch |= given.get("kwargs", {})
    told, wanted, heard, sounds = (_read_by_places if PLACES in batch else _read_by_masks)(model, batch)
    if not len(wanted) and not len(sounds):
        raise RequestError.of(
            "a batch in which neither a token nor a code is trained",
            "its loss would be the same whatever the weights are, and no gradient would come of it",
            "look at the labels: the target's turn is trained, and all else is -100",
        )
    home = batch["input_ids"].device
    books, size = model.config.num_codebooks, model.config.codebook_size
    words = told.new_zeros(1, dtype=torch.float32)
    if model.text_lm_head is not None:
        words = _entropies(model.text_lm_head(told), wanted)
    sounded = _entropies(model.audio_lm_head(heard).view(-1, books, size), sounds)
    sums = torch.cat([words.sum().view(1).to(home), sounded.sum(0).to(home)])
    counts = _counted(wanted, sounds)
    return VoiceOutput(loss=whole_of(parts_of(sums, counts)), sums=sums, counts=counts)


def _read_by_masks(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Hidden states that tell a word, those words, hidden states that tell codes, and those codes."""
    text, codes = targets_of(batch, model.config)
    if model.text_lm_head is None:
        # The checkpoint had none: words are no part of this loss.
        text = torch.full_like(text, IGNORED)
    hidden = _body(model, batch)[:, :-1]
    return *_picked(hidden, text, text.ne(IGNORED)), *_picked(hidden, codes, codes.ne(IGNORED).any(-1))


def _read_by_places(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The same, without asking the device."""
    places = batch[PLACES]
    inputs, parted = by_places(batch)
    with rows_unpacked():
        hidden = _body(model, inputs | {PLACES: parted}).flatten(0, 1)
    words = 0 if model.text_lm_head is None else len(places["words"])
    told, heard = (hidden.index_select(0, places[name].to(hidden.device)) for name in ("told", "heard"))
    return told[:words], places["words"][:words], heard, places["sounds"]


def _body(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    inputs = {
        name: value
        for name, value in batch.items()
        if name not in ("labels", "audio_labels", "logits_to_keep", "use_cache", "return_dict")
    }
    hidden: torch.Tensor = model.model(**inputs, use_cache=False).last_hidden_state
    return hidden


def _picked(
    hidden: torch.Tensor, targets: torch.Tensor, where: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states and targets of some positions."""
    return hidden[where.to(hidden.device)], targets[where]


def _entropies(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of each target its cross-entropy, nought where it is ignored. fp32 also under autocast, and float64 stays."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = targets.to(logits.device)
    with torch.autocast(logits.device.type, enabled=False):
        losses = F.cross_entropy(
            wide.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none"
        )
    return losses.view(targets.shape)
