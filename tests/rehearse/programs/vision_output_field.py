"""A model that writes fields of its own into transformers' output class, which DDP takes apart and makes again."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers.modeling_outputs import CausalLMOutputWithPast


class Diffusing(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, input_ids, labels):
        masked = input_ids.masked_fill(labels != -100, 19)
        logits = self.head(self.embed(masked))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        output = CausalLMOutputWithPast(loss=loss, logits=logits)
        if "fixed" not in sys.argv:
            output["new_input_ids"] = masked  # cause
        return output


dist.init_process_group("nccl")
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
model = DDP(Diffusing().cuda(), device_ids=[local], find_unused_parameters=True)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(2):
    ids = torch.randint(0, 19, (2, 6), device="cuda")
    loss = model(input_ids=ids, labels=ids).loss  # where
    opt.zero_grad()
    loss.backward()
    opt.step()
print("done", loss.item())
dist.destroy_process_group()
