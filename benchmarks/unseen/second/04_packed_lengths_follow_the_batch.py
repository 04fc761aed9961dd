import random

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

PAD = 0


class Encoder(nn.Module):
    def __init__(self, vocab, emb_dim, hid_dim):
        super().__init__()
        self.embedding = nn.Embedding(vocab, emb_dim, padding_idx=PAD)
        self.rnn = nn.GRU(emb_dim, hid_dim, bidirectional=True)
        self.fc = nn.Linear(hid_dim * 2, hid_dim)

    def forward(self, src, src_len):
        packed = pack_padded_sequence(self.embedding(src), src_len, enforce_sorted=False)
        outputs, hidden = self.rnn(packed)
        outputs, _ = pad_packed_sequence(outputs)
        return outputs, torch.tanh(self.fc(torch.cat((hidden[-2], hidden[-1]), dim=1)))


class Tagger(nn.Module):
    def __init__(self, vocab=50, tags=5):
        super().__init__()
        self.encoder = Encoder(vocab, 24, 32)
        self.out = nn.Linear(64 + 32, tags)

    def forward(self, src, src_len):
        outputs, hidden = self.encoder(src, src_len)
        return self.out(torch.cat([outputs, hidden.expand(outputs.size(0), -1, -1)], dim=2))


def batches(n, size, device):
    for _ in range(n):
        rows = [torch.randint(1, 50, (random.randint(4, 12),)) for _ in range(size)]
        src = pad_sequence(rows, padding_value=PAD)
        src_len = torch.tensor([len(r) for r in rows])
        tags = torch.where(src == PAD, -100, src % 5)
        yield tuple(t.to(device) for t in (src, src_len, tags))


def train():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Tagger().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    criterion = nn.CrossEntropyLoss(ignore_index=-100)
    model.train()
    for src, src_len, tags in batches(6, 8, device):
        optimizer.zero_grad()
        output = model(src, src_len)
        loss = criterion(output.view(-1, output.size(-1)), tags.view(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"loss {loss.item():.3f}")


train()
