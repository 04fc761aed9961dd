"""Dense retrieval with a shared encoder and negatives from all ranks."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TextEncoder(nn.Module):
    def __init__(self, vocab=300, dim=32):
        super().__init__()
        self.words = nn.EmbeddingBag(vocab, dim, mode="mean", padding_idx=0)
        self.project = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))

    def forward(self, tokens):
        return F.normalize(self.project(self.words(tokens)), dim=-1)


def gather_passages(passages):
    parts = [torch.zeros_like(passages) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, passages)
    return torch.cat(parts)


def contrastive_loss(questions, passages, temperature=0.05):
    candidates = gather_passages(passages)
    offset = dist.get_rank() * questions.size(0)
    targets = torch.arange(questions.size(0), device=questions.device) + offset
    return F.cross_entropy(questions @ candidates.t() / temperature, targets)


def pairs(n=96, length=12, vocab=300):
    g = torch.Generator().manual_seed(17)
    passages = torch.randint(1, vocab, (n, length), generator=g)
    keep = torch.randint(0, length, (n, 5), generator=g)
    return TensorDataset(passages.gather(1, keep), passages)


def train(epochs=2, batch_size=12):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(0)

    data = pairs()
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler, drop_last=True)
    model = DDP(TextEncoder().to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for short, full in loader:
            short, full = short.to(device), full.to(device)
            tokens = torch.cat([F.pad(short, (0, full.size(1) - short.size(1))), full])
            questions, passages = model(tokens).chunk(2)
            loss = contrastive_loss(questions, passages)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    dist.init_process_group(backend="nccl")
    train()
    dist.destroy_process_group()
