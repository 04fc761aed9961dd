"""The built-in model that sees: a SigLIP-shaped tower, LLaVA's connector and a small Llama decoder, of Trimtab's own.

It is made of transformers' classes with weights from a seed, written once into the user's cache with a tokenizer and a
processor, as any model folder. Nobody has trained it: its answers are noise until a run has taught it something. It is
small enough to learn drawn pictures on two processor cores in minutes, and shows nothing about larger models.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.cache import cache_root
from trimtab.models.builtin import made_once, save_quietly
from trimtab.models.word_tokens import UNKNOWN, vocabulary, word_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

NAME = "tiny-vision"
SEED = 20
PICTURE_SIZE, PATCH_SIZE = 64, 32

PAD, END, IMAGE, MASK = "<pad>", "<|end|>", "<image>", "<mask>"
_SPECIAL = (PAD, UNKNOWN, END, IMAGE, MASK, "<|system|>", "<|user|>", "<|assistant|>")
# Words that are one token each. All other text is read and written letter by letter, or byte by byte.
_WORDS = (
    *("What", "Which", "Where", "How", "is", "are", "the", "a", "at", "many", "there", "yes", "no"),
    *("colour", "shape", "shapes", "bar", "bars", "tallest", "shortest", "left", "right", "top", "bottom"),
    *("circle", "square", "triangle", "cross", "red", "green", "blue", "yellow", "purple", "black", "white"),
    *"0123456789",
)

_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

SHAPE: dict[str, Any] = {
    "model_type": "llava",
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": PICTURE_SIZE,
        "patch_size": PATCH_SIZE,
        "vision_use_head": False,
    },
    "text_config": {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "vocab_size": len(vocabulary(_SPECIAL, _WORDS)),
        # Wider than Llama's 0.02, which is meant for thousands of channels: with 128 it leaves words hardly apart.
        "initializer_range": 0.08,
        "tie_word_embeddings": True,
        "pad_token_id": _SPECIAL.index(PAD),
        "bos_token_id": None,
        "eos_token_id": _SPECIAL.index(END),
    },
    "image_token_id": _SPECIAL.index(IMAGE),
    "image_seq_length": (PICTURE_SIZE // PATCH_SIZE) ** 2,
    # SigLIP has no class token: every token of the last layer is a part of the picture.
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "tie_word_embeddings": True,
    "pad_token_id": _SPECIAL.index(PAD),
    "bos_token_id": None,
    "eos_token_id": _SPECIAL.index(END),
}


def tiny_vision_folder() -> Path:
    """The model's folder, made now if it is not there yet."""
    # The number is raised when the model changes, so that no old copy is taken for the new one.
    return made_once(NAME, cache_root() / "models" / "tiny-vision-1", _make)


def _make(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model: Any = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**SHAPE))
    save_quietly(model, folder)
    tiny_vision_processor().save_pretrained(folder)


def tiny_vision_processor() -> ProcessorMixin:
    """Pictures as squares of SHAPE's size, questions as words."""
    from transformers import LlavaProcessor, SiglipImageProcessorPil

    # White paper becomes 0, so that what is drawn on it is what the tower gets.
    pictures = SiglipImageProcessorPil(
        size={"height": PICTURE_SIZE, "width": PICTURE_SIZE}, image_mean=[1.0] * 3, image_std=[0.5] * 3
    )
    return LlavaProcessor(
        pictures,
        tiny_vision_tokenizer(),
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="full",
        chat_template=_TEMPLATE,
        image_token=IMAGE,
    )


def tiny_vision_tokenizer() -> PreTrainedTokenizerBase:
    """Whole words where it has them, letters elsewhere, bytes for the rest: no text is unknown to it."""
    return word_tokenizer(
        _SPECIAL,
        _WORDS,
        pad_token=PAD,
        eos_token=END,
        mask_token=MASK,
        extra_special_tokens=[IMAGE, "<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=_TEMPLATE,
        model_max_length=SHAPE["text_config"]["max_position_embeddings"],
    )
