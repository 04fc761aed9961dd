import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Conformerish(nn.Module):
    def __init__(self, feat=20, dim=32, vocab=12):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(feat, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.ctc_head = nn.Linear(dim, vocab)
        self.token_embed = nn.Embedding(vocab, dim)
        self.decoder = nn.Linear(2 * dim, vocab)

    def forward_encoder(self, feats):
        memory = self.encoder(feats)
        return memory, self.ctc_head(memory)

    def forward_decoder(self, memory, tokens):
        context = memory.mean(1, keepdim=True).expand(-1, tokens.size(1), -1)
        return self.decoder(torch.cat([context, self.token_embed(tokens)], dim=-1))

    def forward(self, feats, tokens):
        memory, ctc = self.forward_encoder(feats)
        return ctc, self.forward_decoder(memory, tokens)


def compute_loss(model, feats, tokens, lengths, att_rate=0.7):
    memory, ctc = model.module.forward_encoder(feats)
    att = model.module.forward_decoder(memory, tokens[:, :-1])
    log_probs = F.log_softmax(ctc, -1).transpose(0, 1)
    ctc_loss = F.ctc_loss(log_probs, tokens, lengths[0], lengths[1])
    att_loss = F.cross_entropy(att.flatten(0, 1), tokens[:, 1:].flatten())
    return (1 - att_rate) * ctc_loss + att_rate * att_loss


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(42)
    model = DDP(Conformerish().to(device), device_ids=[device.index])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(100 + rank)
    for batch in range(10):
        feats = torch.randn(4, 24, 20, generator=generator).to(device)
        tokens = torch.randint(1, 12, (4, 5), generator=generator).to(device)
        lengths = (torch.full((4,), 24), torch.full((4,), 5))
        loss = compute_loss(model, feats, tokens, lengths)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"batch {batch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
