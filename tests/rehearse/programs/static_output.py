"""An inner model that adds to its output by a dict, under DDP with a static graph."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_outputs import MaskedLMOutput


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        y = self.lin(x)
        result = MaskedLMOutput(loss=y.pow(2).mean(), logits=y)
        if "fixed" not in sys.argv:
            result.__setitem__("noise_level", x.std())  # cause
        return result


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x * 2)


def main():
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    net = DistributedDataParallel(Outer().cuda(), device_ids=[rank], static_graph=True)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        out = net(torch.rand(2, 4, device="cuda"))  # where
        opt.zero_grad()
        out.loss.backward()
        opt.step()
    print("done", out.loss.item())
    dist.destroy_process_group()


main()
