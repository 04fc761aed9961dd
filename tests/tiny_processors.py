"""Tiny models with processors of their own, offline: a small tokenizer with the family's special tokens, the family's
image processor at tiny sizes, and a chat template that writes what the family's own writes.

`tiny_pair("qwen3_vl")` gives a random model and the processor that feeds it; `saved_pair` writes both to a folder that
`model.name` takes. Pictures are 28 pixels wide for most, so that a batch takes milliseconds.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tiny_models import IMAGE_TEXT, MORE_IMAGE_TEXT, config

CHATML = ["<|im_start|>", "<|im_end|>"]
_PARTS = (
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}PICTURE"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
)
_CHATML = (
    "{% for m in messages %}DEFAULT{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    + _PARTS
    + "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_QWEN_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
_LLAVA = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}{% endif %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
_ONEVISION = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' }}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ '\n' + part['text'] }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_IDEFICS = (
    "{{ 'OPENING' }}{% for m in messages %}{{ m['role'] | capitalize }}"
    "{% if m['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    + _PARTS.replace("PICTURE", "<image>")
    + "{{ '<end_of_utterance>\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% set first = '' %}{% set rest = messages %}{% if messages[0]['role'] == 'system' %}"
    "{% set first = messages[0]['content'][0]['text'] + '\n\n' %}{% set rest = messages[1:] %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}"
    "{{ first if loop.first else '' }}{% for part in m['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<start_of_image>' }}{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """What a family's processor is made of."""

    pictures: str
    """The class of its image processor."""
    sizes: dict[str, Any]
    template: str | None
    special: list[str]
    eos: str
    picture: str
    """The token that stands for a part of a picture in `input_ids`."""
    own: dict[str, Any] = field(default_factory=dict)
    """The processor's own arguments."""
    named: dict[str, str] = field(default_factory=dict)
    """Tokens that the tokenizer has as attributes."""
    bos: str | None = None
    adds_bos: bool = False


_SQUARE = {"size": {"height": 28, "width": 28}}
_QWEN = {"size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}}
_SPLIT = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
_IDEFICS_TOKENS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"] + [
    f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)
]
_QWEN_TOKENS = [*CHATML, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]

FAMILIES: dict[str, Family] = {
    "llava": Family(
        "CLIPImageProcessorPil",
        {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
        _LLAVA,
        ["<image>"],
        "</s>",
        "<image>",
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        bos="<s>",
        adds_bos=True,
    ),
    "llava_onevision": Family(
        "LlavaOnevisionImageProcessorPil",
        {**_SQUARE, "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28], [56, 56]]},
        _ONEVISION,
        [*CHATML, "<image>", "<video>"],
        "<|im_end|>",
        "<image>",
        {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    ),
    "qwen2_5_vl": Family(
        "Qwen2VLImageProcessorPil",
        _QWEN,
        _CHATML.replace("PICTURE", _QWEN_PICTURE).replace(
            "DEFAULT",
            "{% if loop.first and m['role'] != 'system' %}"
            "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}",
        ),
        _QWEN_TOKENS,
        "<|im_end|>",
        "<|image_pad|>",
    ),
    "qwen3_vl": Family(
        "Qwen2VLImageProcessorPil",
        {"patch_size": 16, "size": {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}},
        _CHATML.replace("PICTURE", _QWEN_PICTURE).replace("DEFAULT", ""),
        _QWEN_TOKENS,
        "<|im_end|>",
        "<|image_pad|>",
    ),
    "idefics3": Family(
        "Idefics3ImageProcessorPil",
        _SPLIT,
        _IDEFICS.replace("OPENING", "<|begin_of_text|>"),
        _IDEFICS_TOKENS,
        "<end_of_utterance>",
        "<image>",
        {"image_seq_len": 1},
        bos="<|begin_of_text|>",
        adds_bos=True,
    ),
    "smolvlm": Family(
        "SmolVLMImageProcessorPil",
        _SPLIT,
        _IDEFICS.replace("OPENING", "<|im_start|>"),
        [*_IDEFICS_TOKENS, "<|im_start|>"],
        "<end_of_utterance>",
        "<image>",
        {"image_seq_len": 1},
    ),
    "paligemma": Family(
        "SiglipImageProcessorPil",
        {**_SQUARE, "image_seq_length": 4},
        None,
        ["<image>"],
        "<eos>",
        "<image>",
        bos="<bos>",
    ),
    "gemma3": Family(
        "Gemma3ImageProcessorPil",
        _SQUARE,
        _GEMMA,
        ["<start_of_turn>", "<end_of_turn>"],
        "<eos>",
        "<image_soft_token>",
        {"image_seq_length": 4},
        {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        bos="<bos>",
        adds_bos=True,
    ),
    "internvl": Family(
        "GotOcr2ImageProcessorPil",
        {**_SQUARE, "min_patches": 1, "max_patches": 4},
        _CHATML.replace("PICTURE", "{{ '<IMG_CONTEXT>\n' }}").replace("DEFAULT", ""),
        CHATML,
        "<|im_end|>",
        "<IMG_CONTEXT>",
        {"image_seq_length": 1},
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
}
_WORDS = """How many bars are there in this picture? Which colour is the largest of the two shapes? The circle is red
and the square is blue. What does it show: a chart with three columns, or a line? User assistant system model"""


def tiny_tokenizer(family: Family) -> Any:
    """A byte-level tokenizer of a few hundred tokens, opened as the family's is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    edges = [family.bos] if family.bos else []
    special = list(dict.fromkeys(["<pad>", family.eos, *edges, *family.special, *family.named.values()]))
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([_WORDS], trainer)
    opening = [family.bos] if family.adds_bos else []
    made.post_processor = processors.TemplateProcessing(
        single=[*opening, "$A"],
        pair=[*opening, "$A", "$B:1"],
        special_tokens=[(token, special.index(str(token))) for token in opening],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=family.eos,
        pad_token="<pad>",
        bos_token=family.bos,
        additional_special_tokens=family.special,
        extra_special_tokens=family.named,
        model_input_names=["input_ids", "attention_mask"],
    )


@cache
def _processor(model_type: str) -> Any:
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    from trimtab.models.load import _without_videos

    family = FAMILIES[model_type]
    pictures = getattr(transformers, family.pictures)(**family.sizes)
    made = _without_videos(PROCESSOR_MAPPING[type(config(model_type))])
    return made(pictures, tiny_tokenizer(family), chat_template=family.template, **family.own)


def tiny_processor(model_type: str) -> Any:
    """The family's own processor, as `load_processor` makes it: by Pillow, with no part for videos."""
    return copy.deepcopy(_processor(model_type))


def tiny_config(model_type: str, processor: Any, **text: Any) -> Any:
    """The architecture's tiny config with the vocabulary and the special ids of the processor; `text`: its language
    model's settings."""
    family, tokenizer = FAMILIES[model_type], processor.tokenizer
    shape = (IMAGE_TEXT | MORE_IMAGE_TEXT)[model_type]
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
    ids["eos_token_id"] = tokenizer.eos_token_id
    words = {**shape["text_config"], **ids, "vocab_size": len(tokenizer), "max_position_embeddings": 1024}
    places = {key for key in shape if key in ("image_token_index", "image_token_id")}
    changes: dict[str, Any] = dict.fromkeys(places, tokenizer.convert_tokens_to_ids(family.picture))
    for key, token in (
        ("video_token_index", "<video>"),
        ("video_token_id", "<|video_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
    ):
        if key in shape:
            changes[key] = tokenizer.convert_tokens_to_ids(token)
    if pinpoints := family.sizes.get("image_grid_pinpoints"):
        changes["image_grid_pinpoints"] = pinpoints
    return config(model_type, **changes, **ids, text_config=words | text)


def tiny_pair(model_type: str, seed: int = 7, **text: Any) -> tuple[Any, Any]:
    """A random model in fp32 on the CPU, in evaluation mode, and its processor."""
    import torch
    from transformers import AutoModelForImageTextToText

    processor = tiny_processor(model_type)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(tiny_config(model_type, processor, **text)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("mm_input_projection_weight"):
            # Gemma 3's starts as noughts, which let no gradient through to the tower.
            torch.nn.init.normal_(parameter, std=0.02)
    return model, processor


def saved_pair(model_type: str, folder: Path, **text: Any) -> Path:
    """Both in one folder, as `save_pretrained` writes them: a value for `model.name`."""
    model, processor = tiny_pair(model_type, **text)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
