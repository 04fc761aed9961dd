"""Steps until a fixed point rests, proposals kept by their score, tokens until the end sign: sizes and ends by values."""
import torch
from torch import nn

torch.manual_seed(5)
END = 2


class Equilibrium(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)

    def once(self, z, x):
        return self.norm(torch.tanh(self.inner(z)) * 0.5 + x)

    def forward(self, x):
        z = torch.zeros_like(x)
        with torch.no_grad():
            for turn in range(30):
                new = self.once(z, x)
                rest = (new - z).norm() / (new.norm() + 1e-8)
                z = new
                if rest < 1e-3:
                    break
        return self.once(z, x)


class Finder(nn.Module):
    def __init__(self, width=1024):
        super().__init__()
        self.words = nn.Embedding(5000, width)
        self.body = Equilibrium(width)
        self.score, self.box, self.refine = nn.Linear(width, 1), nn.Linear(width, 4), nn.Linear(width, 4)
        self.head = nn.Linear(width, 5000)

    def forward(self, ids):
        return self.body(self.words(ids))


net = Finder().cuda()
opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
seen = 0
for step in range(4):
    ids = torch.randint(0, 5000, (4, 128), device="cuda")
    hidden = net(ids)
    loss = nn.functional.cross_entropy(net.head(hidden[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    for row in range(len(ids)):
        scores = net.score(hidden[row]).squeeze(-1).sigmoid()
        keep = (scores > 0.5).nonzero().squeeze(-1)
        if keep.numel() == 0:
            continue
        seen += keep.numel()
        chosen = hidden[row][keep]
        boxes = net.box(chosen) + net.refine(chosen)
        first = max(keep.tolist(), key=lambda n: scores[n].item())
        loss = loss + boxes.abs().mean() - scores[first].log() * 0.1
    if not torch.isfinite(loss):
        raise SystemExit("diverged")
    opt.zero_grad()
    loss.backward()
    opt.step()
print("proposals", seen)

net.eval()
tokens = [1]
with torch.no_grad():
    while True:
        logits = net.head(net(torch.tensor([tokens], device="cuda")))[0, -1]
        drawn = torch.multinomial((logits / 0.8).softmax(-1), 1).item()
        tokens.append(drawn)
        if drawn == END or len(tokens) == 16:
            break
text = " ".join(f"w{n}" for n in tokens if n != END)
print(len(tokens), text[:40])
