"""A decoder written by hand: argmax tokens as a list, an end token, masked_select, unique, nonzero of scores."""
import torch
from torch import nn

V, D = 32000, 2048


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.layer = nn.TransformerEncoderLayer(D, 16, 8192, batch_first=True)
        self.head = nn.Linear(D, V)

    def forward(self, ids):
        return self.head(self.layer(self.emb(ids)))


net = Tiny().cuda().bfloat16().eval()
ids = torch.randint(0, V, (4, 32), device="cuda")
text = [[] for _ in range(4)]
with torch.no_grad():
    for _ in range(8):
        logits = net(ids)[:, -1]
        token = logits.argmax(-1)
        for row, t in zip(text, token.tolist()):
            if t == 2:
                continue
            row.append(t)
        if (token == 2).all():
            break
        ids = torch.cat([ids, token[:, None]], 1)
    logits = net(ids)
    sure = logits.float().softmax(-1).amax(-1)
    kept = torch.masked_select(ids, sure > 0.5)
    where = (sure > 0.5).nonzero()
    kinds = logits.argmax(-1).unique()
    picked = logits[sure > 0.5]
    print(len(kept), where.shape, kinds.numel(), picked.shape)
print(ids.shape)
assert ids.shape == (4, 40)
