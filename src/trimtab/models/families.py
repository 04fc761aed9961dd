"""What kinds of model there are, and what each needs of the libraries: one table. It loads nothing.

A recipe names the family that it trains; loading, adapters and the model card read the rest here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple


class Unfit(NamedTuple):
    """Why a model of a family cannot be used as its config is."""

    found: str
    why: str
    change: str


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of model."""

    name: str
    wanted: str
    """As a message asks for one: `choose …`."""
    auto_class: str
    """The class of transformers that finds the model's own class by its config."""
    processor: Literal["AutoTokenizer", "AutoProcessor"]
    """What turns a row into tensors."""
    task_type: str | None
    """PEFT's; None takes every argument of the model's forward as it comes."""
    pipeline_tag: str
    """The model card's, by which the hub sorts models."""
    samples: Literal["text", "image", "audio"]
    """How a sample is shown: an answer; a picture, a question and an answer; a clip to play."""
    model_types: tuple[str, ...] = ()
    """The only architectures that it has; empty: all that the class of transformers knows."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the model's own class is made with."""
    may_lack: Mapping[str, str] = field(default_factory=dict)
    """Parts that a checkpoint may be without; the model then goes without them, and this is said."""
    unfit: Callable[[Any], Unfit | None] = lambda config: None
    """What is wrong with a config that the class itself takes."""

    @property
    def auto(self) -> Any:
        import transformers

        return getattr(transformers, self.auto_class)

    def takes(self, config: Any) -> bool:
        """Whether a model of this config belongs to the family."""
        if self.model_types and config.model_type not in self.model_types:
            return False
        return type(config) in self.auto._model_mapping


CAUSAL_LM = Family(
    name="causal language model",
    wanted="a causal language model: a decoder that continues a text, such as Qwen3 or Llama",
    auto_class="AutoModelForCausalLM",
    processor="AutoTokenizer",
    task_type="CAUSAL_LM",
    pipeline_tag="text-generation",
    samples="text",
)
IMAGE_TEXT = Family(
    name="image-text-to-text model",
    wanted="an image-text-to-text model: a language model that sees, such as Qwen3-VL or LLaVA-OneVision",
    auto_class="AutoModelForImageTextToText",
    processor="AutoProcessor",
    task_type="CAUSAL_LM",
    pipeline_tag="image-text-to-text",
    samples="image",
)


def _codes_have_rows(config: Any) -> Unfit | None:
    """Higgs Audio: a stream's BOS and EOS are entries of each codebook; the class's default has no room for them."""
    size, last = config.codebook_size, max(config.audio_stream_bos_id, config.audio_stream_eos_id)
    if last < size:
        return None
    return Unfit(
        f"its config says codebook_size={size}, and audio_stream_bos_id={config.audio_stream_bos_id}, "
        f"audio_stream_eos_id={config.audio_stream_eos_id}",
        "embedding and head have no row for these ids, and the first batch would end in an IndexError",
        f"set codebook_size to {last + 1} in its config.json, as the published weights have it (a config without the "
        "key gets transformers' default, 1024)",
    )


AUDIO = Family(
    name="audio language model",
    wanted="an audio language model: a decoder that speaks, Higgs Audio v2",
    auto_class="AutoModelForTextToWaveform",
    # Its own processor carries a codec along; that is chosen apart (voice.codec), and rows need the tokenizer alone.
    processor="AutoTokenizer",
    task_type=None,
    pipeline_tag="text-to-speech",
    samples="audio",
    model_types=("higgs_audio_v2",),
    # Its text head is left out by default, and with it the loss on the text.
    options={"use_text_head": True},
    may_lack={
        "text_lm_head": "the checkpoint has no text head: the loss is of the codes alone, and no word is trained"
    },
    unfit=_codes_have_rows,
)
FAMILIES = (CAUSAL_LM, IMAGE_TEXT, AUDIO)


ELSEWHERE = {
    "higgs_audio": "this is the format of Boson's own code; take it as transformers has it: by its hub id without "
    "an old model.revision, or the folder that transformers' conversion writes"
}
"""Formats by their model_type that transformers cannot read, and what to do."""


def families_of(config: Any) -> list[Family]:
    """The families that a model of this config belongs to: none, one, or (Gemma 3) two."""
    return [family for family in FAMILIES if family.takes(config)]
