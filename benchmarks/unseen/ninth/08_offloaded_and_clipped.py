"""FSDP2 with the shards on the host, gradients clipped.

torchrun --nproc-per-node 2 08_offloaded_and_clipped.py [--both-backends]
"""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard


class Net(nn.Module):
    def __init__(self, d=128, layers=3):
        super().__init__()
        self.inp = nn.Linear(30, d)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.0, batch_first=True, norm_first=True) for _ in range(layers)
        )
        self.out = nn.Linear(d, 4)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x.mean(1))


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if "--both-backends" in sys.argv else "nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))

    torch.manual_seed(5)
    net = Net()
    how = dict(mesh=mesh, offload_policy=CPUOffloadPolicy(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    for layer in net.layers:
        fully_shard(layer, **how)
    fully_shard(net, **how)

    optim = torch.optim.AdamW(net.parameters(), lr=1e-3)
    torch.manual_seed(50 + local)
    for step in range(3):
        x = torch.randn(16, 12, 30, device="cuda")
        y = torch.randint(0, 4, (16,), device="cuda")
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        if local == 0:
            print(step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
