"""A plain training script: three optimizer steps of one case of `memory_peaks.py`, and the peaks that torch counted.

    python benchmarks/memory_step.py CASE RESULT.json

Nothing in it knows of virtual GPUs: on a machine with a GPU it measures, under `trimtab rehearse --shapes-only` it is
rehearsed. Weights are random, in the shapes of published models.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from memory_cases import CASES, Case
from torch import Tensor, nn


def main() -> None:
    name, result = sys.argv[1:]
    case = CASES[name]
    torch.manual_seed(0)
    model = make_model(case)
    found = {"loaded": figures()}
    if case.evaluate:
        found["evaluate"] = {}  # keeps its place in the order of the phases
    optimizer = make_optimizer(case, model)
    step = make_step(case, model, optimizer)
    for number in range(3):
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        if number != 1:
            found["first step" if number == 0 else "steady step"] = figures()
    if case.evaluate:
        torch.cuda.reset_peak_memory_stats()
        evaluate(case, model)
        found["evaluate"] = figures()
    Path(result).write_text(json.dumps(found), encoding="utf-8")
    print(json.dumps(found))


def figures() -> dict[str, int]:
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "kept": torch.cuda.memory_allocated(),
        "free": torch.cuda.mem_get_info()[0],
    }


def make_model(case: Case) -> Any:
    import transformers

    if case.liger:
        from liger_kernel.transformers import _apply_liger_kernel

        _apply_liger_kernel(case.family)
    config = transformers.AutoConfig.for_model(case.family, **case.config)
    config._attn_implementation = case.attention
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, case.weights))
    with torch.device("cuda"):
        maker = getattr(transformers, case.auto)
        model = maker.from_config(config) if case.auto.startswith("Auto") else maker(config)
    torch.set_default_dtype(before)
    if case.method == "lora":
        from peft import LoraConfig, get_peft_model

        model.requires_grad_(False)
        targets = list(case.targets) or "all-linear"
        model = get_peft_model(
            model, LoraConfig(r=case.rank, target_modules=targets, lora_dropout=case.dropout)
        )
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    model.train()
    return torch.compile(model) if case.compile else model


def make_optimizer(case: Case, model: nn.Module) -> Any:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if case.optimizer == "adamw_8bit":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(trained, lr=1e-4)
    if case.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=1e-4, momentum=0.9)
    fused = case.optimizer == "fused"
    return torch.optim.AdamW(
        trained, lr=1e-4, fused=fused, foreach=None if fused else case.optimizer == "foreach"
    )


def make_step(case: Case, model: Any, optimizer: Any) -> Callable[[], None]:
    batch = make_batch(case, model)

    def step() -> None:
        for _ in range(case.accumulate):
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=case.autocast):
                loss: Tensor = model(**batch).loss
            loss.backward()
        if case.clip:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def make_batch(case: Case, model: Any) -> dict[str, Tensor]:
    config = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    ids = torch.randint(10, min(1000, text.vocab_size), (case.batch, case.length), device="cuda")
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if case.auto.endswith("ForSequenceClassification"):
        return batch | {"labels": torch.zeros(case.batch, dtype=torch.long, device="cuda")}
    if case.auto == "AutoModelForSeq2SeqLM":
        return batch | {"labels": ids[:, : case.length // 4].contiguous()}
    if case.frames:
        ids[:, 1 : 1 + case.frames] = config.audio_token_id
        shape = (case.batch, case.frames, config.num_codebooks)
        batch["audio_input_ids"] = torch.randint(0, config.codebook_size, shape, device="cuda")
        batch["audio_input_ids_mask"] = torch.ones(shape[:2], dtype=torch.bool, device="cuda")
        batch["audio_labels"] = batch["audio_input_ids"].clone()
    if case.patches:
        rows, columns = case.patches
        merge = config.vision_config.spatial_merge_size**2
        ids[:, 1 : 1 + rows * columns // merge] = config.image_token_id
        wide = config.vision_config.patch_size**2 * config.vision_config.temporal_patch_size * 3
        pixels = torch.randn(case.batch * rows * columns, wide, device="cuda", dtype=torch.bfloat16)
        batch["pixel_values"] = pixels
        batch["image_grid_thw"] = torch.tensor([[1, rows, columns]] * case.batch, device="cuda")
        batch["mm_token_type_ids"] = (ids == config.image_token_id).long()
    return batch | {"labels": ids}


@torch.no_grad()
def evaluate(case: Case, model: Any) -> None:
    model.eval()
    batch = make_batch(case, model)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=case.autocast):
        model(**batch)


if __name__ == "__main__":
    main()
