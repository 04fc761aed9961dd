"""How good the plan's memory estimate is: estimate against measured peak, on one CUDA device.

Random weights in the shapes of real models; a training step needs nothing else.
Run: python benchmarks/plan_memory.py
"""

from __future__ import annotations

import gc

import torch

from trimtab.config.schema import LoraSettings, ModelSettings
from trimtab.hardware import probe
from trimtab.models import load_skeleton
from trimtab.models.adapters import add_lora
from trimtab.placement import PlacementRequest, Workload, profile_model, resolve

CASES = [
    ("Qwen/Qwen3-0.6B", "lora", 4, 1024, False),
    ("Qwen/Qwen3-0.6B", "lora", 8, 512, False),
    ("Qwen/Qwen3-0.6B", "lora", 4, 1024, True),
    ("Qwen/Qwen3-0.6B", "full", 4, 1024, False),
    ("Qwen/Qwen3-1.7B", "lora", 4, 1024, False),
    ("Qwen/Qwen3-8B", "lora", 2, 1024, False),
    ("meta-llama/Llama-3.2-1B-Instruct", "lora", 4, 1024, False),
    ("smollm2", "lora", 8, 512, False),
]


def step_peak(name: str, method: str, batch: int, length: int, checkpointing: bool) -> int:
    """Bytes at the peak of two optimizer steps, the CUDA context left out."""
    from trl.trainer.utils import add_fused_lm_head

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    skeleton = load_skeleton(ModelSettings(name=name))
    dtype = torch.float32 if method == "full" else torch.bfloat16
    model = skeleton.to(dtype).to_empty(device="cuda")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for buffer in model.buffers():
        buffer.zero_()
    add_fused_lm_head(model)
    if method == "lora":
        model = add_lora(model, LoraSettings())
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = torch.randint(0, 1000, (batch, length), device="cuda")
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(
                input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids), fused_lm_head=True
            ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


def main() -> None:
    print("| model | method | batch × length | checkpointing | estimate GiB | peak GiB | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name, method, batch, length, checkpointing in CASES:
        skeleton = load_skeleton(ModelSettings(name=name))
        model = add_lora(skeleton, LoraSettings()) if method == "lora" else skeleton
        work = Workload(batch_size=batch, max_length=length, gradient_checkpointing=checkpointing)
        plan = resolve(
            PlacementRequest(device="cuda:0"),
            probe(),
            profile_model(model),
            work,
            full_tuning=method == "full",
        )
        share = plan.memory["cuda:0"]
        estimate = share.needed - share.overhead
        peak = step_peak(name, method, batch, length, checkpointing)
        print(
            f"| {name} | {method} | {batch} × {length} | {'yes' if checkpointing else 'no'} | {estimate / 2**30:.2f} "
            f"| {peak / 2**30:.2f} | {estimate / peak:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
