"""What kinds of model there are, and what each needs of the libraries: one table. It loads nothing.

A recipe names the family that it trains; loading, adapters and the model card read the rest here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


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
AUDIO = Family(
    name="audio language model",
    wanted="an audio language model: a decoder that speaks, Higgs Audio v2",
    auto_class="AutoModelForTextToWaveform",
    processor="AutoProcessor",
    task_type=None,
    pipeline_tag="text-to-speech",
    samples="audio",
    model_types=("higgs_audio_v2",),
    # Its text head is left out by default, and with it the loss on the text.
    options={"use_text_head": True},
)
FAMILIES = (CAUSAL_LM, IMAGE_TEXT, AUDIO)


def families_of(config: Any) -> list[Family]:
    """The families that a model of this config belongs to: none, one, or (Gemma 3) two."""
    return [family for family in FAMILIES if family.takes(config)]
