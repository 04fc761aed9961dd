"""A vision-language model of 7B class on one GPU: SHIRG's views, LoRA in tower, connector and language model, bf16,
checkpointing or none; Trimtab's trainer beside transformers' own on the same model, rows and settings.

    python benchmarks/vision_speed.py --batch 4 --steps 12 [--checkpointing]

Weights are random (nothing is downloaded), made from a seed on the GPU, in the shape of LLaVA-OneVision-7B: the
SigLIP-so400m tower, its connector and Qwen2-7B. Each trainer starts from the same adapter. `trainer` is transformers'
own; `plain` is Trimtab's with no part of `speed`; `trimtab` is what the recipe does by default on a GPU: the loss at
the head, adapters in bf16, layers compiled, a fused optimizer. Step times are of the steps after the first three (the
first compiles); memory is what torch says was allocated at most.
"""

from __future__ import annotations

import argparse
import io
import json
import platform
import random
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image, ImageDraw
from timer import Timer
from transformers import AutoConfig, AutoModelForImageTextToText, Trainer, TrainingArguments

from trimtab.config.schema import LoraSettings, ModelSettings, ShirgSettings
from trimtab.data.picture_collate import PictureCollator
from trimtab.data.pictures import Picture, asked
from trimtab.fast.answer_loss import AnswerLoss, proved, unproved
from trimtab.fast.apply import make_fast
from trimtab.models.adapters import add_lora
from trimtab.models.families import IMAGE_TEXT
from trimtab.models.load import load_processor, shapes_only
from trimtab.models.shirg import attach_shirg, shirg_processor
from trimtab.placement import PlacementPlan, move
from trimtab.placement.plan import Speed
from trimtab.recipes.lean_steps import lean_steps
from trimtab.recipes.picture_trainer import ROWS, PictureTrainer, answers_alone

SHAPES = {
    "7b": (
        {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 26,
            "num_attention_heads": 16,
            "image_size": 384,
            "patch_size": 14,
        },
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "max_position_embeddings": 32768,
        },
    ),
    "tiny": (
        {
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 384,
            "patch_size": 14,
        },
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 1024,
            "max_position_embeddings": 4096,
        },
    ),
}
WARM_UP = 3


def chart(number: int) -> Picture:
    """A bar chart of its own, as large as those of ChartQA."""
    draw_from = random.Random(number)
    image = Image.new("RGB", (850, 600), "white")
    draw = ImageDraw.Draw(image)
    for bar in range(8):
        top = draw_from.randint(60, 520)
        colour = tuple(draw_from.randint(0, 255) for _ in range(3))
        draw.rectangle((60 + 95 * bar, top, 125 + 95 * bar, 540), fill=colour)
    held = io.BytesIO()
    image.save(held, "PNG")
    return Picture(held.getvalue(), f"chart {number}")


def measured(
    kind: type[Trainer], model: Any, collate: Any, rows: list[Any], wanted: argparse.Namespace, **own: Any
) -> Any:
    """A run of one trainer: images a second, peak memory, losses. `own` goes to the trainer."""
    on_gpu = wanted.device == "cuda"
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(prefix="vision-speed-"),
        max_steps=wanted.steps,
        per_device_train_batch_size=wanted.batch,
        learning_rate=1.8e-5,
        bf16=on_gpu,
        gradient_checkpointing=wanted.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        remove_unused_columns=False,
        label_names=["labels"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=wanted.workers,
        use_cpu=not on_gpu,
        seed=0,
    )
    timer = Timer(torch.device(wanted.device))
    trainer = kind(
        model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=[timer], **own
    )
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    # As a recipe's driver has its own trainers train.
    with nullcontext() if kind is Trainer else lean_steps(trainer):
        trainer.train()
    steps = [after - before for before, after in zip(timer.times, timer.times[1:], strict=False)][WARM_UP:]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "images_per_second": wanted.batch * len(steps) / sum(steps),
        "seconds_per_step": sum(steps) / len(steps),
        "first_step_s": timer.times[1] - timer.times[0],
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "losses": losses,
    }


def made_fast(model: Any, batch: dict[str, Any], wanted: argparse.Namespace) -> AnswerLoss:
    """What the recipe does to the model by default where it trains on a GPU."""
    on_gpu = wanted.device == "cuda"
    plan = PlacementPlan(
        device=wanted.device,
        precision="bf16" if on_gpu else "fp32",
        scaler=False,
        weight_precision="bf16" if on_gpu else "fp32",
        strategy="single",
        speed=Speed(
            adapters="fused", head="chunked", compile=on_gpu, kernels="triton" if on_gpu else "plain"
        ),
    )
    make_fast(model, plan, print)
    batch = move(batch, plan)
    rows = batch.pop(ROWS)
    with torch.autocast(wanted.device, dtype=torch.bfloat16, enabled=on_gpu):
        # Of shapes alone no loss can be compared: as in the recipe, the model's parts tell.
        answers = unproved(model) if shapes_only() else proved(model, batch, rows)
    assert isinstance(answers, AnswerLoss), answers
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--only", choices=["trainer", "plain", "trimtab"])
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()

    tower, text = SHAPES[wanted.shape]
    processor: Any = load_processor(ModelSettings(name="tiny-vision"), IMAGE_TEXT)
    config = AutoConfig.for_model(
        "llava_onevision",
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **tower},
        text_config={"model_type": "qwen2", **text},
        image_token_index=processor.tokenizer.convert_tokens_to_ids(processor.image_token),
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if wanted.device == "cuda" else torch.float32
    with torch.device(wanted.device):
        model: Any = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    shirg = ShirgSettings()
    attach_shirg(model, shirg)
    lora = LoraSettings(r=64, alpha=128, dropout=0.05, targets=["vision", "connector", "attention"])
    model.config.use_cache = False
    model = add_lora(model, lora, IMAGE_TEXT)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    start = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    collator = PictureCollator(shirg_processor(processor, shirg, model.config), max_length=2048)
    rows = [
        asked("Which bar is the tallest?", ("the red bar on the left",), (chart(n),), f"row {n}")
        for n in range(wanted.batch * (wanted.steps + 1))
    ]
    tokens = int(collator(rows[:1])["input_ids"].shape[1])

    found: dict[str, Any] = {}
    # In this order: the last one changes the model.
    for name in ("trainer", "plain", "trimtab"):
        if wanted.only not in (None, name):
            continue
        with torch.no_grad():
            for parameter, value in start.items():
                model.get_parameter(parameter).copy_(value)
        try:
            if name == "trainer":
                found[name] = measured(Trainer, model, collator, rows, wanted)
            elif name == "plain":
                found[name] = measured(PictureTrainer, model, answers_alone(model, collator), rows, wanted)
            else:
                collate = answers_alone(model, collator, numbered=True)
                answers = made_fast(model, collate(rows[:2]), wanted)
                found[name] = measured(PictureTrainer, model, collate, rows, wanted, answers=answers)
        except torch.OutOfMemoryError as error:
            found[name] = {"out_of_memory": str(error).splitlines()[0]}
        model.zero_grad(set_to_none=True)
    gpu = torch.cuda.get_device_name() if wanted.device == "cuda" else platform.processor()
    report = {
        "machine": gpu,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in start.values()),
        "tokens_a_row": tokens,
        "batch": wanted.batch,
        "steps": wanted.steps,
        "checkpointing": wanted.checkpointing,
        **found,
    }
    print(json.dumps(report, indent=2))
    if wanted.json:
        wanted.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
