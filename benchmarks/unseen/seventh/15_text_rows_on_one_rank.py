"""Two ranks train a vision-language model; every gradient is averaged as soon as autograd has it, by a hook.

usage: torchrun --nproc-per-node 2 15_text_rows_on_one_rank.py [dummy]
"""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

DUMMY = "dummy" in sys.argv[1:]
dist.init_process_group(backend="nccl")
RANK = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def layers(width, heads, n):
    return nn.Sequential(*[nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True) for _ in range(n)])


class SeeAndTell(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(588, 1024)
        self.tower = layers(1024, 16, 24)
        self.bridge = nn.Linear(1024, 2560)
        self.words = nn.Embedding(32000, 2560)
        self.lm = layers(2560, 20, 32)
        self.head = nn.Linear(2560, 32000, bias=False)

    def forward(self, ids, pixels=None):
        x = self.words(ids)
        if pixels is not None:
            seen = self.bridge(self.tower(self.patch(pixels)))
            x = torch.cat([seen[: len(ids)], x], dim=1) if not pixels.requires_grad else x + 0 * seen.sum()
        return self.head(self.lm(x))[:, -ids.shape[1] :]


def average(p):
    dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)


torch.manual_seed(7)
model = SeeAndTell().to("cuda", torch.bfloat16)
for p in model.parameters():
    p.register_post_accumulate_grad_hook(average)
opt = torch.optim.SGD(model.parameters(), lr=1e-3)


def batch(step):
    ids = torch.randint(0, 32000, (2, 128), device="cuda")
    text_only = RANK == 1 and step == 1
    if not text_only:
        return ids, torch.randn(2, 256, 588, device="cuda", dtype=torch.bfloat16)
    if DUMMY:
        return ids, torch.zeros(1, 1, 588, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return ids, None


for step in range(3):
    ids, pixels = batch(step)
    logits = model(ids, pixels)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    opt.step()
    opt.zero_grad()
    shown = loss.detach()
    dist.all_reduce(shown, op=dist.ReduceOp.AVG)
    if RANK == 0:
        print(step, shown.item())
dist.destroy_process_group()
