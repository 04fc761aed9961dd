"""The tokens by which a text tells a model of the Higgs Audio family where sound stands, and the ids inside a stream.

Read from the model's config and from its tokenizer, which must agree; nothing is assumed of either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trimtab.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NAMES = {
    "audio_token": "<|AUDIO_OUT|>",
    "audio_bos_token": "<|audio_out_bos|>",
    "audio_delay_token": "<|reserved_special_token_6|>",
    "audio_eos_token": "<|audio_eos|>",
}
"""What transformers' own processor takes where the tokenizer has no such attribute."""


@dataclass(frozen=True)
class Mark:
    """A token of the text, by both of its names."""

    text: str
    id: int


@dataclass(frozen=True)
class VoiceMarks:
    """The four tokens that go with a clip, and the shape of its codes."""

    audio: Mark
    """Stands for a column of codes."""
    bos: Mark
    """Stands before a clip; a generation prompt ends in it."""
    delay: Mark
    """Stands for each of the last columns, which the delay alone has made."""
    eos: Mark
    """Stands behind a clip."""
    codebooks: int
    stream_bos: int
    stream_eos: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, config: Any) -> VoiceMarks:
        found = {name: _mark(tokenizer, name) for name in _NAMES}
        for name, mark in found.items():
            # The token behind a clip is the tokenizer's alone.
            wanted = getattr(config, f"{name}_id", mark.id)
            if wanted != mark.id:
                raise RequestError.of(
                    f"the model's config says {name}_id={wanted}, its tokenizer has {mark.text} at {mark.id}",
                    "the model would take words for sound, and sound for words",
                    "use the tokenizer that belongs to the model",
                )
        if tokenizer.pad_token_id in (found["audio_token"].id, found["audio_delay_token"].id):
            raise RequestError.of(
                f"the tokenizer pads with {tokenizer.pad_token}, which also stands for sound",
                "padding would be taken for sound",
                "give the tokenizer a padding token of its own",
            )
        size, bos, eos = config.codebook_size, config.audio_stream_bos_id, config.audio_stream_eos_id
        if bos == eos or not 0 <= min(bos, eos) <= max(bos, eos) < size:
            raise RequestError.of(
                f"the model's config says codebook_size={size}, audio_stream_bos_id={bos} and "
                f"audio_stream_eos_id={eos}",
                "a stream's BOS and EOS are two entries of each codebook, beside the codes",
                f"set codebook_size to {max(bos, eos) + 1} in the model's config.json, as its weights have it",
            )
        return cls(
            audio=found["audio_token"],
            bos=found["audio_bos_token"],
            delay=found["audio_delay_token"],
            eos=found["audio_eos_token"],
            codebooks=config.num_codebooks,
            stream_bos=bos,
            stream_eos=eos,
        )

    def placeholders(self, columns: int) -> list[int]:
        """What stands for a clip of this many columns."""
        late = self.codebooks - 1
        return [self.audio.id] * (columns - late) + [self.delay.id] * late


def _mark(tokenizer: PreTrainedTokenizerBase, name: str) -> Mark:
    text = str(getattr(tokenizer, name, None) or _NAMES[name])
    known = token_id(tokenizer, text)
    if known is None:
        raise RequestError.of(
            f"the tokenizer {type(tokenizer).__name__} has no token {text} ({name})",
            "a clip has its place in the text by that token",
            "use a model of the Higgs Audio family with its own tokenizer",
        )
    return Mark(text, known)


def token_id(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """The one token that the tokenizer takes this text for, wherever it stands; None where there is none."""
    known = tokenizer.convert_tokens_to_ids(text)
    if not isinstance(known, int) or tokenizer.convert_ids_to_tokens(known) != text:
        return None
    return known if known in tokenizer(f"a{text}a", add_special_tokens=False)["input_ids"] else None
