"""Translation with a two-way GRU over packed rows, a GRU decoder with additive attention step by step, Adamax."""
import json
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

VOCAB, DIM, HIDDEN, BATCH, SOURCE, TARGET, STEPS = 24000, 512, 1024, 128, 80, 48, 4


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, padding_idx=0)
        self.rnn = nn.GRU(DIM, HIDDEN, num_layers=2, bidirectional=True, dropout=0.3, batch_first=True)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        out, h = self.rnn(packed)
        out, _ = pad_packed_sequence(out, batch_first=True, total_length=ids.size(1))
        return out, h[-1]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.cell = nn.GRUCell(DIM + 2 * HIDDEN, HIDDEN)
        self.keys, self.query, self.score = nn.Linear(2 * HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)
        self.out = nn.Linear(3 * HIDDEN, VOCAB)

    def forward(self, target, memory, h, pad):
        keys, logits = self.keys(memory), []
        for t in range(target.size(1)):
            e = self.score(torch.tanh(keys + self.query(h)[:, None])).squeeze(-1).masked_fill(pad, -1e9)
            c = torch.bmm(e.softmax(-1)[:, None], memory).squeeze(1)
            h = self.cell(torch.cat([self.embed(target[:, t]), c], -1), h)
            logits.append(self.out(torch.cat([h, c], -1)))
        return torch.stack(logits, 1)


random.seed(0)
encoder, decoder = Encoder().to("cuda"), Decoder().to("cuda")
opt = torch.optim.Adamax([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
for step in range(STEPS):
    rows = [torch.randint(1, VOCAB, (random.randint(SOURCE // 4, SOURCE),)) for _ in range(BATCH)]
    lengths = torch.tensor([len(r) for r in rows])
    source = pad_sequence(rows, batch_first=True).to("cuda")
    target = torch.randint(1, VOCAB, (BATCH, TARGET + 1), device="cuda")
    memory, h = encoder(source, lengths)
    logits = decoder(target[:, :-1], memory, h, source == 0)
    loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_([*encoder.parameters(), *decoder.parameters()], 0.5)
    opt.step()
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
