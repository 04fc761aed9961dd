"""Higgs Audio v2 in its 3B shape on one GPU with LoRA: Trimtab's trainer beside transformers' own on the same model,
the same rows and the same settings.

    python benchmarks/voice_speed.py --precision bf16 --precision fp16 --json voice-speed.json

Weights are random (nothing is downloaded), made from a seed on the GPU; codes are random numbers, words are the ones of
a sentence. The settings are those of examples/voice-3b.yaml: one row a pass, four passes a step, rank 8, clipping at
0.5. fp16 has a gradient scaler and adapters in fp32, bf16 has none. transformers' Trainer takes the model's own loss
(the sum over the codebooks, and all text logits), so losses are not compared here: the tests do that. As it is, it
fails in half precision; `mended` is the same with the one cast that it lacks. `plain` is Trimtab's trainer with no part
of `speed` and text and sound found by masks; `trimtab` is what the recipe does by default on a GPU: places told by the
collator, adapters in the activations' format, layers compiled. Step times are of the steps after the first three (the
first compiles); memory is what torch says was allocated at most.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from timer import Timer
from transformers import (
    AutoConfig,
    HiggsAudioV2ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from trimtab.config.schema import LoraSettings, ModelSettings, VoiceSettings
from trimtab.data.voice_collate import CodedRow, VoiceCollator
from trimtab.data.voice_rows import VoiceRow
from trimtab.fast.apply import make_fast
from trimtab.models.adapters import add_lora
from trimtab.models.families import AUDIO
from trimtab.models.load import load_model_config, load_tokenizer
from trimtab.models.voice_loss import teach_voice
from trimtab.models.voice_places import PlacedVoices
from trimtab.placement import PlacementPlan
from trimtab.placement.plan import Speed
from trimtab.recipes.lean_steps import lean_steps
from trimtab.recipes.voice_trainer import VoiceTrainer

WARM_UP = 3
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TINY |= {"head_dim": 16}
FRAMES_A_SECOND = 25


def spoken(number: int, seconds: float, codebooks: int) -> CodedRow:
    """A row with a reference and a target of this many seconds, of random codes."""
    generator = torch.Generator().manual_seed(number)

    def codes() -> torch.Tensor:
        return torch.randint(0, 1024, (int(seconds * FRAMES_A_SECOND), codebooks), generator=generator)

    said = "The sun rises in the east and sets in the west, and nobody has ever seen it do otherwise."
    row = VoiceRow(
        text=said,
        target=None,
        reference=None,
        reference_text=said,
        scene=None,
        speaker=None,
        where=f"row {number}",
    )
    return CodedRow(row, codes(), codes())


def measured(
    kind: type[Trainer],
    model: Any,
    collate: Any,
    rows: list[CodedRow],
    precision: str,
    wanted: argparse.Namespace,
) -> Any:
    """A run of one trainer: seconds a step, peak memory, gradient norms."""
    on_gpu = wanted.device == "cuda"
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(prefix="voice-speed-"),
        max_steps=wanted.steps,
        per_device_train_batch_size=wanted.batch,
        gradient_accumulation_steps=wanted.accumulation,
        learning_rate=1e-5,
        max_grad_norm=0.5,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
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
    trainer = kind(model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=[timer])
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    # As a recipe's driver has its own trainers train.
    with nullcontext() if kind is Trainer else lean_steps(trainer):
        trainer.train()
    steps = [after - before for before, after in zip(timer.times, timer.times[1:], strict=False)][WARM_UP:]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "seconds_per_step": sum(steps) / len(steps),
        "first_step_s": timer.times[1] - timer.times[0],
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "losses": [entry["loss"] for entry in logged],
        "gradient_norms": [entry["grad_norm"] for entry in logged],
    }


def random_model(shape: Any, precision: str, wanted: argparse.Namespace) -> Any:
    """The model with random weights in the precision of the run."""
    torch.manual_seed(0)
    weights = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with torch.device(wanted.device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(weights)
        try:
            model: Any = HiggsAudioV2ForConditionalGeneration(shape, use_text_head=True)
        finally:
            torch.set_default_dtype(before)
    model.config.use_cache = False
    return model


def as_text_embeds(embeddings: Any, args: Any, embedded: torch.Tensor) -> torch.Tensor:
    """Autocast adds up a frame's codes in fp32; the model wants them in the text's format."""
    return embedded.to(embeddings.embed_audio_tokens.weight.dtype)


def with_adapter(model: Any) -> Any:
    """Ready to be trained: frozen, with an adapter in fp32."""
    torch.manual_seed(0)
    lora = LoraSettings(r=8, alpha=16, dropout=0.05, targets=["attention", "audio_mlp", "audio_head"])
    tuned: Any = add_lora(model, lora, AUDIO)
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return tuned


def plan_of(precision: Any, wanted: argparse.Namespace) -> PlacementPlan:
    """With the parts of `speed` that the recipe takes by default on a GPU."""
    on_gpu = wanted.device == "cuda"
    return PlacementPlan(
        device=wanted.device,
        precision=precision,
        scaler=precision == "fp16",
        weight_precision=precision,
        trainable_precision="fp32",
        strategy="single",
        speed=Speed(adapters="fused", compile=on_gpu, kernels="triton" if on_gpu else "plain"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=["3b", "tiny"], default="3b")
    parser.add_argument("--precision", action="append", choices=["fp32", "bf16", "fp16"])
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="length of the reference and of the target"
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", choices=["trimtab", "plain", "mended", "trainer"])
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()

    # Rows are read by the built-in voice's tokenizer, whose marks have other numbers than Higgs Audio's.
    reader = ModelSettings(name="tiny-voice")
    marks = {
        name: id for name, id in load_model_config(reader).to_dict().items() if name.endswith("_token_id")
    }
    shape = load_model_config(ModelSettings(name="higgs-3b-shape"))
    shape = AutoConfig.for_model(**{**shape.to_dict(), **marks, **(TINY if wanted.shape == "tiny" else {})})
    collator = VoiceCollator(load_tokenizer(reader), shape, VoiceSettings(), 2048)
    needed = wanted.batch * wanted.accumulation * (wanted.steps + 1)
    rows = [spoken(number, wanted.seconds, shape.num_codebooks) for number in range(needed)]
    tokens = int(collator(rows[:1])["input_ids"].shape[1])

    found: dict[str, Any] = {}
    for precision in wanted.precision or ["bf16", "fp16"]:
        kinds = {"trainer": Trainer, "mended": Trainer, "plain": VoiceTrainer, "trimtab": VoiceTrainer}
        for name, kind in kinds.items():
            if wanted.only not in (None, name):
                continue
            # A model of its own: what was done to one must not be seen in the other.
            model = random_model(shape, precision, wanted)
            if kind is VoiceTrainer:
                teach_voice(model)
            if name == "mended":
                model.model.embed_audio_tokens.register_forward_hook(as_text_embeds)
            model = with_adapter(model)
            count = sum(p.numel() for p in model.parameters())
            collate: Any = collator
            if name == "trimtab":
                make_fast(model, plan_of(precision, wanted), print)
                collate = PlacedVoices(collator, shape)
            try:
                found[f"{precision} {name}"] = measured(kind, model, collate, rows, precision, wanted)
            except RuntimeError as error:
                # Of transformers' own loss this is a finding, and the others are still measured.
                if kind is VoiceTrainer:
                    raise
                found[f"{precision} {name}"] = {"failed": str(error).splitlines()[0]}
            del model
            # A trainer and its model hold each other.
            gc.collect()
            if wanted.device == "cuda":
                torch.cuda.empty_cache()
    told = {
        "parameters": count,
        "tokens_a_row": tokens,
        "settings": {key: str(value) for key, value in vars(wanted).items()},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": torch.cuda.get_device_name() if wanted.device == "cuda" else platform.processor(),
        "runs": found,
    }
    print(json.dumps(told, indent=1))
    if wanted.json:
        wanted.json.write_text(json.dumps(told, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
