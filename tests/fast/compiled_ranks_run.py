"""Two ranks train a model with compiled layers, under DDP or FSDP2: `compiled_ranks_run.py CASE FOLDER`."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from tiny_models import TEXT
from trimtab.fast.blocks import compile_blocks
from trimtab.fast.lora import use_fast_adapters

case, folder = sys.argv[1], Path(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
base = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TEXT))
model: Any = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear")).train()
for name, parameter in model.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(parameter, std=0.05)
plain = copy.deepcopy(model)
use_fast_adapters(model)
blocks = compile_blocks(model, dynamic=True, _backend="aot_eager")


def wrapped(bare: Any) -> Any:
    if case == "ddp":
        return DistributedDataParallel(bare)
    for layer in bare.get_base_model().model.layers:
        fully_shard(layer)
    return fully_shard(bare)


def trained(wrapped_model: Any, own: Any) -> list[float]:
    optimizer = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        ids = torch.randint(0, TEXT["vocab_size"], (2, 8 + 4 * step))
        loss = wrapped_model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


found = {
    "compiled": trained(wrapped(model), model),
    "plain": trained(wrapped(plain), plain),
    "told": blocks.as_dict(),
}
(folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
dist.destroy_process_group()
