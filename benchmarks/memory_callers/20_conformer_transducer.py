"""Speech to text: a conformer encoder, an LSTM predictor, a joint over time and labels, the transducer loss by hand."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

DIM, LAYERS, HEADS, KERNEL, JOINT, VOCAB = 512, 16, 8, 31, 640, 1024
BATCH, FRAMES, LABELS, MELS, STEPS = 16, 1600, 60, 80, 3
NEVER = -1e30


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.wide = nn.Conv1d(DIM, 2 * DIM, 1)
        self.depth = nn.Conv1d(DIM, DIM, KERNEL, padding=KERNEL // 2, groups=DIM)
        self.batch = nn.BatchNorm1d(DIM)
        self.out = nn.Conv1d(DIM, DIM, 1)

    def forward(self, x):
        y = F.glu(self.wide(self.norm(x).transpose(1, 2)), dim=1)
        return self.out(F.silu(self.batch(self.depth(y)))).transpose(1, 2)


def half():
    return nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.SiLU(), nn.Dropout(0.1), nn.Linear(4 * DIM, DIM), nn.Dropout(0.1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.conv = half(), half(), Conv()
        self.norm, self.last = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, HEADS, dropout=0.1, batch_first=True)

    def forward(self, x, padding):
        x = x + 0.5 * self.first(x)
        y = self.norm(x)
        x = x + self.attention(y, y, y, key_padding_mask=padding, need_weights=False)[0]
        x = x + self.conv(x)
        return self.last(x + 0.5 * self.second(x))


class Transducer(nn.Module):
    def __init__(self):
        super().__init__()
        self.sub = nn.Sequential(nn.Conv2d(1, DIM // 2, 3, 2, 1), nn.ReLU(), nn.Conv2d(DIM // 2, DIM // 2, 3, 2, 1), nn.ReLU())
        self.into = nn.Linear(DIM // 2 * (MELS // 4), DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.words = nn.Embedding(VOCAB, DIM)
        self.lstm = nn.LSTM(DIM, DIM, batch_first=True)
        self.of_sound, self.of_text, self.out = nn.Linear(DIM, JOINT), nn.Linear(DIM, JOINT), nn.Linear(JOINT, VOCAB)

    def forward(self, mels, lengths, labels):
        x = self.sub(mels[:, None])
        x = self.into(x.permute(0, 2, 1, 3).flatten(2))
        padding = torch.arange(x.shape[1], device=x.device)[None] >= lengths[:, None]
        for block in self.blocks:
            x = block(x, padding)
        with torch.autocast("cuda", enabled=False):  # the predictor stays in fp32
            text, _ = self.lstm(self.words(F.pad(labels, (1, 0))))
        return self.out(torch.tanh(self.of_sound(x)[:, :, None] + self.of_text(text)[:, None]))


def transducer_loss(logits, labels, frames, counts):
    logp = logits.float().log_softmax(-1)
    batch, time, places, _ = logp.shape
    blank = logp[..., 0]
    said = logp[:, :, :-1].gather(3, labels[:, None, :, None].expand(-1, time, -1, -1)).squeeze(3)
    said = F.pad(said, (1, 0), value=NEVER)  # what it costs to come to place u
    diagonals = time + places - 1
    u = torch.arange(places, device=logits.device)
    when = torch.arange(diagonals, device=logits.device)[:, None] - u[None]
    outside = (when < 0) | (when >= time)
    index = when.clamp(0, time - 1)[None].expand(batch, -1, -1)
    blank = blank.gather(1, index).masked_fill(outside, NEVER)
    said = said.gather(1, index).masked_fill(outside, NEVER)
    alpha = torch.full((batch, places), NEVER, device=logits.device)
    alpha[:, 0] = 0
    kept = [alpha]
    for n in range(1, diagonals):
        stay = alpha + blank[:, n - 1]
        come = F.pad(alpha[:, :-1], (1, 0), value=NEVER) + said[:, n]
        alpha = torch.logaddexp(stay, come)
        kept.append(alpha)
    row = torch.arange(batch, device=logits.device)
    last = frames - 1 + counts
    return -(torch.stack(kept, 1)[row, last, counts] + blank[row, last, counts]).mean()


torch.manual_seed(5)
model = Transducer().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), weight_decay=1e-6)
for step in range(STEPS):
    mels = torch.randn(BATCH, FRAMES - 160 * step, MELS, device="cuda")
    time = mels.shape[1] // 4
    frames = torch.randint(time // 2, time + 1, (BATCH,), device="cuda")
    labels = torch.randint(1, VOCAB, (BATCH, LABELS), device="cuda")
    counts = torch.randint(LABELS // 2, LABELS + 1, (BATCH,), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(mels, frames, labels)
    loss = transducer_loss(logits, labels, frames, counts)
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    print(step, loss.item(), norm.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
