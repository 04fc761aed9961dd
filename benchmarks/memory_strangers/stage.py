"""The model folder, the rows and the config of a case that goes through `trimtab train`. Measures nothing.

A case is a JSON file: `model` (a config of transformers, with its `model_type`), `rows` (what it is trained on), and
`settings`, as a user's YAML has them. Nothing is downloaded: weights are random, the tokenizer is trained here.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from sft_stage import full_rows, make_tokenizer

CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}PICTURE{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ONE_AT_A_TIME = threading.Lock()
"""Libraries that are imported by several threads at once may be seen half made."""
QWEN_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


def stage(folder: Path, case: Path, *, weights: bool) -> Path:
    """Write all that `trimtab train` reads, and say where its config is; without `weights` the model is its config."""
    told = json.loads(case.read_text(encoding="utf-8"))
    model = folder / "model"
    with ONE_AT_A_TIME:
        _save_reader(model, told["model"])
    if weights:
        # In a process of its own: this one never touches the GPU, whose memory is what is measured.
        subprocess.run([sys.executable, __file__, str(model)], check=True, stdout=subprocess.DEVNULL)
    settings = told["settings"]
    name = settings.get("model", {})
    settings["model"] = {**name, "name": str(model)}
    if rows := told.get("rows"):
        source = _write_rows(folder, **rows)
        settings["data"] = {**settings.get("data", {}), "source": str(source)}
    settings |= {"device": "cuda", "output_dir": str(folder / "run"), "monitor": {"progress": "none"}}
    file = folder / "config.yaml"
    file.write_text(json.dumps(settings, indent=1), encoding="utf-8")
    return file


def _save_reader(model: Path, told: dict[str, Any]) -> None:
    """The config, and what turns rows into tensors: a tokenizer, around it a processor where the model sees."""
    from transformers import AutoConfig

    kind, changes = told["model_type"], {}
    if kind == "higgs_audio_v2":
        from trimtab.models.tiny_voice import SHAPE, tiny_voice_tokenizer

        reader: Any = tiny_voice_tokenizer()
        told = {**SHAPE, **told}
    else:
        tokenizer = make_tokenizer(told.get("vocab_size", 49152), None)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = CHAT
        reader = tokenizer
        ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
        changes = dict(ids)
        if kind in READERS:
            reader, places = READERS[kind](tokenizer, told)
            told = {**told, "text_config": {**told["text_config"], **ids}}
            changes |= places
    config = AutoConfig.for_model(**{**told, **changes}, dtype="bfloat16")
    config.architectures = [_class_of(config).__name__]
    config.save_pretrained(model)
    reader.save_pretrained(model)
    if kind in VIDEO_READERS:
        # Where torchvision is installed, the processor asks for this part too, though no video is shown.
        videos = {
            "video_processor_type": VIDEO_READERS[kind],
            "patch_size": told["vision_config"]["patch_size"],
        }
        (model / "video_preprocessor_config.json").write_text(json.dumps(videos), encoding="utf-8")


def _class_of(config: Any) -> Any:
    import transformers

    for auto in ("AutoModelForImageTextToText", "AutoModelForTextToWaveform", "AutoModelForCausalLM"):
        known = getattr(transformers, auto)._model_mapping
        if type(config) in known:
            found = known[type(config)]
            return found[0] if isinstance(found, tuple | list) else found
    raise ValueError(config.model_type)


def _idefics3(tokenizer: Any, told: dict[str, Any]) -> tuple[Any, dict[str, int]]:
    from transformers import AutoConfig, Idefics3ImageProcessorPil
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    from trimtab.models.load import _without_videos

    more = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    more += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer.add_special_tokens({"additional_special_tokens": [*more, "<|im_start|>", "<|im_end|>"]})
    side = told["vision_config"]["image_size"]
    pictures = Idefics3ImageProcessorPil(
        size={"longest_edge": 4 * side}, max_image_size={"longest_edge": side}
    )
    made = _without_videos(PROCESSOR_MAPPING[type(AutoConfig.for_model("idefics3"))])
    places = (side // told["vision_config"]["patch_size"] // told["scale_factor"]) ** 2
    reader = made(pictures, tokenizer, chat_template=CHAT.replace("PICTURE", "<image>"), image_seq_len=places)
    return reader, {"image_token_id": tokenizer.convert_tokens_to_ids("<image>")}


def _qwen_vl(tokenizer: Any, told: dict[str, Any]) -> tuple[Any, dict[str, int]]:
    from transformers import AutoConfig, Qwen2VLImageProcessorPil
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    from trimtab.models.load import _without_videos

    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [*names.values(), "<|im_start|>", "<|im_end|>"]}
    )
    pictures = Qwen2VLImageProcessorPil(
        patch_size=told["vision_config"]["patch_size"],
        size={"shortest_edge": 64 * 64, "longest_edge": 1024 * 1024},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    made = _without_videos(PROCESSOR_MAPPING[type(AutoConfig.for_model(told["model_type"]))])
    reader = made(pictures, tokenizer, chat_template=CHAT.replace("PICTURE", QWEN_PICTURE))
    return reader, {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}


def _llava(tokenizer: Any, told: dict[str, Any]) -> tuple[Any, dict[str, int]]:
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", "<|im_start|>", "<|im_end|>"]})
    side = told["vision_config"]["image_size"]
    reader = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side}),
        tokenizer,
        patch_size=told["vision_config"]["patch_size"],
        vision_feature_select_strategy=told["vision_feature_select_strategy"],
        num_additional_image_tokens=1,  # the tower's class token, which the strategy leaves out
        chat_template=CHAT.replace("PICTURE", "<image>\n"),
    )
    return reader, {"image_token_index": tokenizer.convert_tokens_to_ids("<image>")}


READERS = {"idefics3": _idefics3, "qwen3_vl": _qwen_vl, "qwen2_5_vl": _qwen_vl, "llava": _llava}
"""What makes the processor of a model that sees, and says which tokens its config names."""
VIDEO_READERS = {"qwen3_vl": "Qwen3VLVideoProcessor", "qwen2_5_vl": "Qwen2VLVideoProcessor"}


def _write_rows(
    folder: Path, *, kind: str, count: int, words: int, shortest: int | None = None, **more: Any
) -> Path:
    """Rows of `words` words, or of a number drawn from `shortest` on."""
    draw = random.Random(0)
    texts = [text.split() for text in full_rows(count, words)]
    cut = [" ".join(text[: draw.randint(shortest, words)] if shortest else text) for text in texts]
    if kind == "text":
        rows: list[Any] = [{"text": text} for text in cut]
    elif kind == "answers":
        rows = [{"prompt": text[: len(text) // 3], "completion": text[len(text) // 3 :]} for text in cut]
    elif kind == "sums":
        rows = [
            {"question": f"{text} What is {n} and {n + 3}?", "answer": str(2 * n + 3)}
            for n, text in enumerate(cut)
        ]
    else:
        rows = [_drawn(folder, number, text, draw, **more) for number, text in enumerate(cut)]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def _drawn(
    folder: Path, number: int, text: str, draw: random.Random, *, sizes: list[list[int]]
) -> dict[str, Any]:
    from PIL import Image, ImageDraw

    size = tuple(sizes[number % len(sizes)])
    image = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(image)
    for bar in range(6):
        left, top = bar * size[0] // 6, draw.randint(0, size[1] - 10)
        pen.rectangle((left, top, left + size[0] // 9, size[1] - 1), fill=(40 * bar, number % 256, 90))
    image.save(folder / f"{number}.png")
    return {"image": f"{number}.png", "question": f"{number}: which bar?", "answer": text}


def save_weights(model: Path, device: str = "cuda") -> None:
    """Random weights for a folder that has a config, made on the GPU."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    more = {"use_text_head": True} if config.model_type == "higgs_audio_v2" else {}
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        made = _class_of(config)(config, **more)
    made.save_pretrained(model, max_shard_size="8GB")


if __name__ == "__main__":
    save_weights(Path(sys.argv[1]), *sys.argv[2:])
