"""Four 4090s with nn.DataParallel. Only the first one fills up and I do not see why.

python 02_logits_come_home.py [--loss-inside]
"""
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, D, LAYERS, HEADS, T, ROWS = 128256, 1536, 16, 12, 1024, 16
INSIDE = "--loss-inside" in sys.argv


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, D)
        x = x + self.out(y)
        return x + self.down(F.relu(self.up(self.ln2(x))).square())


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, D)
        self.pos = nn.Embedding(T, D)
        self.layers = nn.Sequential(*[Layer() for _ in range(LAYERS)])
        self.ln = nn.LayerNorm(D)

    def forward(self, ids, labels=None):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        logits = self.ln(self.layers(x)) @ self.tok.weight.t()
        if labels is None:
            return logits
        return lm_loss(logits, labels).reshape(1)


def lm_loss(logits, labels):
    return F.cross_entropy(logits.float().view(-1, VOCAB), labels.reshape(-1))


model = Decoder().to(device="cuda", dtype=torch.bfloat16)
net = nn.DataParallel(model, device_ids=[0, 1, 2, 3])
opt = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=True)

for it in range(2):
    text = torch.randint(0, VOCAB, (ROWS, T + 1))
    ids, labels = text[:, :-1].cuda(), text[:, 1:].cuda()
    if INSIDE:
        loss = net(ids, labels).mean()
    else:
        out = net(ids)
        loss = lm_loss(out, labels)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"it {it}: {loss.item():.3f}")
