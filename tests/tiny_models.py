"""Tiny shapes of real architectures, of every family: configs alone, so that a test makes them on any device."""

from __future__ import annotations

from typing import Any

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
SIGLIP = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_QWEN_TOWER = {"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "out_hidden_size": 32}

IMAGE_TEXT: dict[str, dict[str, Any]] = {
    "llava_onevision": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **SIGLIP},
        "image_token_index": 100,
        "video_token_index": 101,
        "image_grid_pinpoints": [[28, 28]],
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": _ROPE},
        "vision_config": _QWEN_TOWER | {"fullatt_block_indexes": [2]},
        "image_token_id": 100,
        "video_token_id": 101,
        "vision_start_token_id": 102,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "head_dim": 8, "rope_parameters": _ROPE},
        "vision_config": _QWEN_TOWER | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
        "image_token_id": 100,
        "video_token_id": 101,
        "vision_start_token_id": 102,
    },
    "idefics3": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": SIGLIP,
        "image_token_id": 100,
        "scale_factor": 2,
    },
    "paligemma": {
        "text_config": {"model_type": "gemma", **TEXT, "head_dim": 8},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
            "projection_dim": 32,
            **SIGLIP,
        },
        "image_token_index": 100,
        "projection_dim": 32,
    },
    "gemma3": {
        "text_config": {**TEXT, "head_dim": 8},
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **SIGLIP},
        "mm_tokens_per_image": 4,
        "image_token_index": 100,
    },
}
CLIP = {**SIGLIP, "model_type": "clip_vision_model", "projection_dim": 24}
MORE_IMAGE_TEXT: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": CLIP,
        "image_token_index": 100,
        "image_seq_length": 4,
    },
    "smolvlm": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {**SIGLIP, "model_type": "smolvlm_vision"},
        "image_token_id": 100,
        "scale_factor": 2,
    },
    "internvl": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {**SIGLIP, "image_size": [28, 28], "patch_size": [14, 14]},
        "image_token_id": 100,
        "image_seq_length": 1,
    },
}
"""Shapes that only the tests of pictures use."""
AUDIO: dict[str, dict[str, Any]] = {
    "higgs_audio_v2": {
        **TEXT,
        "head_dim": 8,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "num_codebooks": 4,
        "codebook_size": 1026,
        "audio_token_id": 100,
        "audio_bos_token_id": 101,
        "audio_delay_token_id": 102,
    },
}
CAUSAL: dict[str, dict[str, Any]] = {"llama": TEXT, "qwen3": {**TEXT, "head_dim": 8}}
SHAPES = CAUSAL | IMAGE_TEXT | MORE_IMAGE_TEXT | AUDIO


def config(model_type: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **{**SHAPES[model_type], **changes})


def skeleton(model_type: str, device: str = "meta", **changes: Any) -> Any:
    """The model of this architecture as its own family loads it, with random weights or none (`meta`)."""
    import torch
    import transformers

    auto = (
        transformers.AutoModelForImageTextToText
        if model_type in IMAGE_TEXT | MORE_IMAGE_TEXT
        else transformers.AutoModelForTextToWaveform
        if model_type in AUDIO
        else transformers.AutoModelForCausalLM
    )
    with torch.device(device):
        return auto.from_config(config(model_type, **changes))


def batch(model_type: str) -> dict[str, Any]:
    """One row with a picture or a clip between words."""
    import torch

    placeholders = {"llava_onevision": 10, "idefics3": 1, "higgs_audio_v2": 3}.get(model_type, 4)
    ids = torch.tensor([[5, 6, *[100] * placeholders, 7, 8, 9]])
    generator = torch.Generator().manual_seed(0)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model_type == "higgs_audio_v2":
        codes = torch.randint(0, 1026, (1, 3, 4), generator=generator)
        return inputs | {
            "audio_input_ids": codes,
            "audio_input_ids_mask": torch.ones(1, 3, dtype=torch.bool),
        }
    shapes = {
        "llava_onevision": (1, 2, 3, 28, 28),
        "idefics3": (1, 1, 3, 28, 28),
        "qwen2_5_vl": (16, 3 * 2 * 14 * 14),
        "qwen3_vl": (16, 3 * 2 * 16 * 16),
    }
    pixels = torch.randn(shapes.get(model_type, (1, 3, 28, 28)), generator=generator)
    inputs |= {"pixel_values": pixels, "labels": ids}
    if model_type == "llava_onevision":
        inputs["image_sizes"] = torch.tensor([[28, 28]])
    if model_type in ("paligemma", "gemma3"):
        inputs["token_type_ids"] = (ids == 100).long()
    if model_type.startswith("qwen"):
        inputs |= {"image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": (ids == 100).int()}
    return inputs


def codec(**changes: Any) -> Any:
    """A random HiggsAudioV2TokenizerModel, of 24 kHz, 25 frames a second and 8 codebooks as the real one."""
    import torch
    from transformers import HiggsAudioV2TokenizerConfig

    from trimtab.models.higgs_codec import higgs_codec_class

    ratios = [8, 5, 4, 2, 3]
    acoustic = {"encoder_hidden_size": 2, "decoder_hidden_size": 32, "hidden_size": 16}
    semantic = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    convolutions = {"conv_dim": [8] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    torch.manual_seed(0)
    made = higgs_codec_class()(
        HiggsAudioV2TokenizerConfig(
            codebook_dim=8,
            acoustic_model_config={
                "model_type": "dac",
                "downsampling_ratios": ratios,
                "upsampling_ratios": ratios,
            }
            | acoustic,
            semantic_model_config={"model_type": "hubert", "mask_time_prob": 0.0} | semantic | convolutions,
            **{"target_bandwidths": [0.5, 1, 1.5, 2], **changes},
        )
    )
    for quantizer in made.quantizer.quantizers:  # its own start is zeros, which give one code to every sound
        quantizer.codebook.embed.normal_()
    return made.eval()
