"""Models of which only the shape is known: runs of their size are planned and rehearsed with nothing fetched.

Their rows are read by the built-in model's tokenizer, with the tokens that such a model has besides, and pictures by
SigLIP's own steps. There are no weights: `train` refuses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.models import builtin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

_FIRST = 49152
"""The number of the first token after the tokenizer's own."""
IMAGE_TOKEN, IMAGE_ID = "<image>", _FIRST
"""The token that a picture's places have in the text, and its number."""
LLAVA_8B = "llava-8b-shape"
HIGGS_3B = "higgs-3b-shape"
_SIGLIP_SO400M = {
    "model_type": "siglip_vision_model",
    **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16},
    **{"image_size": 384, "patch_size": 14, "vision_use_head": False},
}
_LLAMA_8B = {
    "model_type": "llama",
    **{"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072},
}
HIGGS_AUDIO_3B: dict[str, Any] = {
    "model_type": "higgs_audio_v2",
    **{"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8},
    **{"intermediate_size": 8192, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 2048},
    # 1,024 codes, and a stream's BOS and EOS.
    **{"num_codebooks": 8, "codebook_size": 1026, "tie_word_embeddings": False},
}
"""Higgs Audio v2: Llama 3.2 of three billion weights, with a second MLP for sound in every layer."""
VOICE_TOKENS = (
    *("<|AUDIO_OUT|>", "<|audio_out_bos|>", "<|reserved_special_token_6|>", "<|audio_eos|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|scene_desc_start|>", "<|scene_desc_end|>"),
)
"""What its conversations are written with, beside words."""
SHAPES: dict[str, dict[str, Any]] = {
    HIGGS_3B: {
        **HIGGS_AUDIO_3B,
        **{"audio_token_id": _FIRST, "audio_bos_token_id": _FIRST + 1, "audio_delay_token_id": _FIRST + 2},
        "eos_token_id": _FIRST + VOICE_TOKENS.index("<|eot_id|>"),
        "pad_token_id": 2,
    },
    LLAVA_8B: {
        "model_type": "llava",
        "vision_config": _SIGLIP_SO400M,
        "text_config": _LLAMA_8B,
        "image_token_id": IMAGE_ID,
        "vision_feature_select_strategy": "full",
        # The last layer but one, as LLaVA and LaViDa take it; the connector is a two-layer MLP with GELU.
        "vision_feature_layer": -2,
        "projector_hidden_act": "gelu",
    },
}
_CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def is_shape(name: str) -> bool:
    """Whether a model's name stands for a shape alone."""
    return name.lower() in SHAPES


def builtin_tokenizer() -> PreTrainedTokenizerBase:
    """The built-in model's, for models that have none here."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(builtin.builtin_folder()))
    return tokenizer


def shape_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The built-in model's tokenizer, with the tokens by which this shape's kind of model is told more than words."""
    tokenizer = builtin_tokenizer()
    more = {LLAVA_8B: [IMAGE_TOKEN], HIGGS_3B: list(VOICE_TOKENS)}[name.lower()]
    tokenizer.add_special_tokens({"additional_special_tokens": more})
    return tokenizer


def shape_processor(config: Any) -> ProcessorMixin:
    """What feeds a model that sees: LLaVA's processor around that tokenizer."""
    from transformers import LlavaProcessor, SiglipImageProcessorPil

    tokenizer = shape_tokenizer(LLAVA_8B)
    side = config.vision_config.image_size
    return LlavaProcessor(
        image_processor=SiglipImageProcessorPil(size={"height": side, "width": side}),
        tokenizer=tokenizer,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=0,
        image_token=IMAGE_TOKEN,
        chat_template=_CHAT,
    )
