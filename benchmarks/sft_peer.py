"""One run of a peer for `sft_speed.py`, in a process of its own: HF Trainer + PEFT, with Liger, TRL, or Unsloth.

    python benchmarks/sft_peer.py hf config.yaml result.json

It reads the same config as `trimtab train` and takes from it the rows (tokens and labels are Trimtab's, so that all
train on the same), the adapter, its seed and every setting of training. Nothing of Trimtab's faster ways is used: the
model is transformers', the adapter PEFT's, the loop the peer's own. A step's time is when its loss is logged, which is
also how Trimtab's steps are timed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PEERS = {
    "hf": "HF Trainer + PEFT",
    "hf-compile": "HF Trainer + PEFT, torch_compile",
    "liger": "HF Trainer + PEFT + Liger",
    "trl": "TRL SFTTrainer + PEFT",
    "trl-packed": "TRL SFTTrainer + PEFT, packed",
    "unsloth": "Unsloth, TRL's trainer",
    "unsloth-checkpoint": "Unsloth, its own checkpointing",
    "qlora": "HF Trainer + PEFT + bitsandbytes NF4",
    "qlora-liger": "HF Trainer + PEFT + bitsandbytes NF4 + Liger",
}
NEEDS = {
    "liger": "liger_kernel",
    "trl": "trl",
    "trl-packed": "trl",
    "unsloth": "unsloth",
    "unsloth-checkpoint": "unsloth",
    "qlora": "bitsandbytes",
    "qlora-liger": "bitsandbytes",
}
"""What has to be importable for a peer."""
TOLD = ("transformers", "peft", "trl", "datasets", "liger-kernel", "unsloth", "bitsandbytes", "triton")
"""Packages whose versions a run tells: Unsloth's may be older ones, from a folder of its own."""
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Counted:
    """A collator that keeps how many tokens, padding left out, each of its batches has."""

    def __init__(self, collate: Any) -> None:
        self.collate, self.tokens = collate, list[int]()

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        self.tokens.append(sum(len(row["input_ids"]) for row in rows))
        return self.collate(rows)


def main(kind: str, config_file: str, out: str) -> int:
    if kind.startswith("unsloth"):
        os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"
        os.environ["UNSLOTH_COMPILE_LOCATION"] = tempfile.mkdtemp(prefix="sft-unsloth-")
        import unsloth  # noqa: F401  before transformers, as it demands
    import torch
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments

    from trimtab.config import load_config
    from trimtab.data.prepare import prepare_data
    from trimtab.hardware.packages import installed_version
    from trimtab.models import load_tokenizer

    config = load_config(config_file)
    training, on_gpu = config.training, config.device != "cpu"
    tokenizer = load_tokenizer(config.model)
    rows = prepare_data(config.data, tokenizer, config.seed).train
    half = config.precision == "bf16"
    offloads = kind == "unsloth-checkpoint"
    model = _unsloth(config, offloads) if kind.startswith("unsloth") else _peft(config, on_gpu, half)

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.lines, self.begun = list[tuple[float, float]](), 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.begun = time.time()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                self.lines.append((time.time(), float(logs["loss"])))

    settings: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(prefix="sft-peer-"),
        "max_steps": training.max_steps,
        "per_device_train_batch_size": training.batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "gradient_checkpointing": training.gradient_checkpointing or offloads,
        "gradient_checkpointing_kwargs": {"use_reentrant": False}
        if training.gradient_checkpointing
        else None,
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": training.lr_scheduler,
        "warmup_steps": training.warmup_steps or 0,
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "optim": training.optimizer,
        "bf16": half,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": config.seed,
        "data_seed": config.seed,
        "use_cpu": not on_gpu,
        "torch_compile": kind == "hf-compile",
        "use_liger_kernel": kind.endswith("liger"),
    }
    clock = Clock()
    counted = Counted(DataCollatorForSeq2Seq(tokenizer, padding=True, label_pad_token_id=-100))
    if kind.startswith(("trl", "unsloth")):
        from trl import SFTConfig, SFTTrainer

        packed = kind == "trl-packed"
        trainer: Any = SFTTrainer(
            model=model,
            args=SFTConfig(
                **settings,
                max_length=config.data.max_length,
                packing=packed,
                dataset_kwargs=None if packed else {"skip_prepare_dataset": True},
            ),
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[clock],
        )
        counted.collate = trainer.data_collator
        trainer.data_collator = counted
    else:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**settings),
            train_dataset=rows,
            data_collator=counted,
            callbacks=[clock],
        )
    trainer.train()
    steps, passes = len(clock.lines), training.gradient_accumulation_steps
    found = {
        "begun": clock.begun,
        "times": [at for at, _ in clock.lines],
        "losses": [loss for _, loss in clock.lines],
        "tokens": [sum(counted.tokens[passes * n : passes * (n + 1)]) for n in range(steps)],
        "peak_allocated": torch.cuda.max_memory_allocated() if on_gpu else None,
        "peak_reserved": torch.cuda.max_memory_reserved() if on_gpu else None,
        "packages": {name: version for name in TOLD if (version := installed_version(name))},
    }
    Path(out).write_text(json.dumps(found), encoding="utf-8")
    return 0


def _peft(config: Any, on_gpu: bool, half: bool) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        config.model.name,
        quantization_config=_bitsandbytes(half) if config.model.quantize else None,
        dtype=torch.bfloat16 if half else torch.float32,
        device_map={"": "cuda:0" if on_gpu else "cpu"},
        attn_implementation="sdpa",
    )
    model.config.use_cache = False
    model.requires_grad_(False)
    torch.manual_seed(config.seed)
    return get_peft_model(
        model,
        LoraConfig(
            r=config.lora.r,
            lora_alpha=config.lora.alpha,
            lora_dropout=config.lora.dropout,
            target_modules=NAMES,
            task_type="CAUSAL_LM",
        ),
    )


def _bitsandbytes(half: bool) -> Any:
    """As QLoRA has it. The rest of the model stays in 16 bits: PEFT's `prepare_model_for_kbit_training` would make
    it fp32, which costs more."""
    import torch
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if half else torch.float32,
    )


def _unsloth(config: Any, offloads: bool) -> Any:
    """As its users load it, by a local path alone. `offloads`: the checkpointing that it proposes by default."""
    import torch
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        config.model.name,
        max_seq_length=config.data.max_length,
        dtype=torch.bfloat16,
        load_in_4bit=False,
    )
    torch.manual_seed(config.seed)
    return FastLanguageModel.get_peft_model(
        model,
        r=config.lora.r,
        lora_alpha=config.lora.alpha,
        lora_dropout=config.lora.dropout,
        target_modules=NAMES,
        bias="none",
        use_gradient_checkpointing="unsloth" if offloads else config.training.gradient_checkpointing,
        random_state=config.seed,
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
