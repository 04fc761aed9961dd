"""Two-stage pipeline for a 3.2B float32 transformer under bf16 autocast. Stage 0 sends activations, stage 1 sends their gradient.

torchrun --nproc-per-node 2 10_activations_on_the_wire.py [--wire bfloat16|float32]
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def get_args():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--wire", default="bfloat16", help="type of the activations between the stages")
    p.add_argument("--d-model", type=int, default=3072)
    p.add_argument("--layers-per-stage", type=int, default=16)
    p.add_argument("--micro-batches", type=int, default=4)
    p.add_argument("--steps", type=int, default=2)
    return p.parse_args()


class Res(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.fc = nn.Linear(d, 4 * d)
        self.proj = nn.Linear(4 * d, d)
        self.mix = nn.Linear(d, d)
        self.gate = nn.Linear(d, d)

    def forward(self, x):
        h = self.norm(x)
        x = x + torch.sigmoid(self.gate(h)) * self.mix(h)
        return x + self.proj(F.gelu(self.fc(self.norm(x))))


def stage_zero(args, net, opt, embed):
    for step in range(args.steps):
        outs = []
        for _ in range(args.micro_batches):
            ids = torch.randint(0, 32000, (4, 256), device="cuda")
            dist.send(ids, dst=1)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out = net(embed(ids))
            dist.send(out.detach().contiguous(), dst=1)
            outs.append(out)
        for out in outs:
            grad = torch.empty_like(out)
            dist.recv(grad, src=1)
            out.backward(grad)
        opt.step()
        opt.zero_grad()


def stage_one(args, net, opt, head):
    wire = getattr(torch, args.wire)
    for step in range(args.steps):
        grads, total = [], 0.0
        for _ in range(args.micro_batches):
            ids = torch.empty(4, 256, dtype=torch.long, device="cuda")
            dist.recv(ids, src=0)
            x = torch.empty(4, 256, args.d_model, dtype=wire, device="cuda")
            dist.recv(x, src=0)
            x.requires_grad_()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = head(net(x))
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) / args.micro_batches
            loss.backward()
            grads.append(x.grad)
            total += loss.detach()
        for grad in grads:
            dist.send(grad, dst=0)
        opt.step()
        opt.zero_grad()
        print(f"step {step} loss {total.item():.4f}")


def main():
    args = get_args()
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    net = nn.Sequential(*[Res(args.d_model) for _ in range(args.layers_per_stage)]).cuda()
    end = (nn.Embedding(32000, args.d_model) if rank == 0 else nn.Linear(args.d_model, 32000)).cuda()
    opt = torch.optim.SGD([*net.parameters(), *end.parameters()], lr=1e-2)
    (stage_zero if rank == 0 else stage_one)(args, net, opt, end)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
