"""Multilingual speech encoder: shared layers, one adapter per language, DDP."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LANGUAGES = ["de", "fi", "pl"]


class Utterances(Dataset):
    def __init__(self, n_groups=12, group=4, frames=40, dim=16, n_phones=10):
        g = torch.Generator().manual_seed(3)
        self.audio = torch.randn(n_groups, group, frames, dim, generator=g)
        self.phones = torch.randint(0, n_phones, (n_groups, group, frames), generator=g)

    def __len__(self):
        return len(self.audio)

    def __getitem__(self, i):
        return self.audio[i], self.phones[i], i % len(LANGUAGES)


class SpeechEncoder(nn.Module):
    def __init__(self, dim=16, width=32, depth=3, n_phones=10):
        super().__init__()
        self.front = nn.Linear(dim, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
            for _ in range(depth))
        self.adapters = nn.ModuleDict({
            lang: nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, width))
            for lang in LANGUAGES})
        self.head = nn.Linear(width, n_phones)

    def forward(self, audio, lang):
        x = self.front(audio)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(x + self.adapters[lang](x))


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(0)

    data = Utterances()
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=None, sampler=sampler)
    model = DDP(SpeechEncoder().to(device), device_ids=[local_rank],
                find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for epoch in range(1):
        sampler.set_epoch(epoch)
        model.train()
        for audio, phones, lang in loader:
            audio, phones = audio.to(device), phones.to(device)
            logits = model(audio, LANGUAGES[lang])
            loss = F.cross_entropy(logits.flatten(0, 1), phones.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
