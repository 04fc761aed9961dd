"""The built-in model that speaks: a small Higgs Audio v2 of Trimtab's own.

It is made of transformers' classes with weights from a seed, written once into the user's cache with a tokenizer, as
any model folder. Nobody has trained it: what it says is noise until a run has taught it something. It is small enough
to learn a few clips by heart on two processor cores in minutes, and shows nothing about larger models.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.cache import cache_root
from trimtab.models.builtin import made_once, save_quietly
from trimtab.models.word_tokens import UNKNOWN, vocabulary, word_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAME = "tiny-voice"
SEED = 12
ENTRIES = 1024
"""Of a codebook, beside the two that open and end a stream."""

PAD, BEGIN, END = "<|pad|>", "<|begin_of_text|>", "<|eot_id|>"
AUDIO, AUDIO_BOS, AUDIO_EOS = "<|AUDIO_OUT|>", "<|audio_out_bos|>", "<|audio_eos|>"
# The name that the published checkpoints have for it.
DELAY = "<|reserved_special_token_6|>"
_HEADER, _HEADER_END = "<|start_header_id|>", "<|end_header_id|>"
_SCENE, _SCENE_END = "<|scene_desc_start|>", "<|scene_desc_end|>"
_SPECIAL = (
    *(PAD, UNKNOWN, BEGIN, END, _HEADER, _HEADER_END, _SCENE, _SCENE_END),
    *(AUDIO, AUDIO_BOS, AUDIO_EOS, DELAY),
)
# Words that are one token each. All other text is read and written letter by letter, or byte by byte.
_WORDS = (
    *("system", "user", "assistant", "Generate", "audio", "following", "instruction"),
    *(
        "There",
        "They",
        "It",
        "My",
        "He",
        "We",
        "The",
        "a",
        "the",
        "are",
        "is",
        "have",
        "been",
        "to",
        "in",
        "on",
        "over",
    ),
    *(
        "for",
        "three",
        "many",
        "books",
        "table",
        "building",
        "bridge",
        "river",
        "going",
        "rain",
        "evening",
        "father",
    ),
    *("works", "working", "city", "wanted", "become", "lawyer", "market", "years"),
)

_PARTS = (
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'audio' %}"
    f"{{{{ '{AUDIO_BOS}{AUDIO}{AUDIO_EOS}' }}}}"
    "{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
)
# A scene stands inside the turn before it, the system's, as the published models have it; without their line breaks,
# each of which would be a token here.
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'scene' %}"
    f"{{{{ '{_SCENE}' }}}}{_PARTS}{{{{ '{_SCENE_END}' }}}}"
    "{% else %}"
    f"{{{{ '{_HEADER}' + message['role'] + '{_HEADER_END}' }}}}{_PARTS}"
    "{% endif %}"
    "{% if loop.last or loop.nextitem['role'] != 'scene' %}"
    f"{{{{ '{END}' }}}}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}"
    f"{{{{ '{_HEADER}assistant{_HEADER_END}{AUDIO_BOS}' }}}}"
    "{% endif %}"
)

SHAPE: dict[str, Any] = {
    "model_type": "higgs_audio_v2",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 48,
    "max_position_embeddings": 2048,
    "vocab_size": len(vocabulary(_SPECIAL, _WORDS)),
    "num_codebooks": 8,
    "codebook_size": ENTRIES + 2,
    "audio_stream_bos_id": ENTRIES,
    "audio_stream_eos_id": ENTRIES + 1,
    "audio_token_id": _SPECIAL.index(AUDIO),
    "audio_bos_token_id": _SPECIAL.index(AUDIO_BOS),
    "audio_delay_token_id": _SPECIAL.index(DELAY),
    # Higgs' own is stretched to long contexts, which this model never sees.
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    # Wider than Llama's 0.02, which is meant for thousands of channels: with 192 it leaves words hardly apart.
    "initializer_range": 0.06,
    "pad_token_id": _SPECIAL.index(PAD),
    "bos_token_id": _SPECIAL.index(BEGIN),
    "eos_token_id": _SPECIAL.index(END),
}


def tiny_voice_folder() -> Path:
    """The model's folder, made now if it is not there yet."""
    # The number is raised when the model changes, so that no old copy is taken for the new one.
    return made_once(NAME, cache_root() / "models" / "tiny-voice-2", _make)


def _make(folder: Path) -> None:
    import torch
    from transformers import AutoConfig

    from trimtab.models.families import AUDIO as FAMILY

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model: Any = FAMILY.auto.from_config(AutoConfig.for_model(**SHAPE), **FAMILY.options)
    save_quietly(model, folder)
    tiny_voice_tokenizer().save_pretrained(folder)


def tiny_voice_tokenizer() -> PreTrainedTokenizerBase:
    """Whole words where it has them, letters elsewhere, bytes for the rest: no text is unknown to it."""
    return word_tokenizer(
        _SPECIAL,
        _WORDS,
        pad_token=PAD,
        bos_token=BEGIN,
        eos_token=END,
        extra_special_tokens=[token for token in _SPECIAL if token not in (PAD, UNKNOWN, BEGIN, END)],
        chat_template=_TEMPLATE,
        model_max_length=SHAPE["max_position_embeddings"],
    )
