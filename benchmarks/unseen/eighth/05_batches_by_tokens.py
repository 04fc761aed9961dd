"""Rows of one length each would waste half of every batch, so a batch is as many rows as 600 tokens hold.

torchrun --nproc_per_node=2 05_batches_by_tokens.py [--agree]
"""
import argparse
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence

parser = argparse.ArgumentParser()
parser.add_argument("--agree", action="store_true", help="all ranks make as many steps as the one with the fewest batches")
parser.add_argument("--tokens", type=int, default=600)
opt = parser.parse_args()


class Tagger(nn.Module):
    def __init__(self, words=1000, width=64, tags=12):
        super().__init__()
        self.embed = nn.Embedding(words, width, padding_idx=0)
        self.rnn = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, tags)

    def forward(self, ids):
        return self.out(self.rnn(self.embed(ids))[0])


def sentences(rank, world):
    rng = random.Random(99)
    lengths = sorted(rng.randint(10, 120) for _ in range(60))
    half = len(lengths) // world
    mine = lengths[rank * half : (rank + 1) * half]
    rng = random.Random(rank)
    rng.shuffle(mine)
    return [torch.randint(1, 1000, (n,)) for n in mine]


def by_tokens(rows, budget):
    batch, longest = [], 0
    for row in rows:
        longest = max(longest, len(row))
        if batch and longest * (len(batch) + 1) > budget:
            yield pad_sequence(batch, batch_first=True)
            batch, longest = [], len(row)
        batch.append(row)
    if batch:
        yield pad_sequence(batch, batch_first=True)


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model = DDP(Tagger().cuda())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = list(by_tokens(sentences(rank, world), opt.tokens))
    if opt.agree:
        fewest = torch.tensor(len(batches), device="cuda")
        dist.all_reduce(fewest, op=dist.ReduceOp.MIN)
        batches = batches[: int(fewest)]
    for ids in batches:
        ids = ids.cuda(non_blocking=True)
        scores = model(ids)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), (ids % 12).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    if rank == 0:
        torch.save(model.module.state_dict(), "tagger.pt")
    dist.destroy_process_group()


main()
