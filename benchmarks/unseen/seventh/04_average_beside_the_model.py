"""Pretrains a 2.3B GPT in float32 and keeps an exponential moving average of its weights."""
import argparse
import copy

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=2560)
parser.add_argument("--depth", type=int, default=28)
parser.add_argument("--batch-size", type=int, default=2)
parser.add_argument("--ema-on", default="cuda", choices=["cuda", "cpu"])
parser.add_argument("--decay", type=float, default=0.999)
args = parser.parse_args()
torch.set_float32_matmul_precision("high")


class GPT(nn.Module):
    def __init__(self, width, depth, vocab=32000, context=512):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.places = nn.Embedding(context, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 128, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return F.linear(self.norm(x), self.tokens.weight)


class Average:
    def __init__(self, model, device):
        self.shadow = copy.deepcopy(model).to(device).requires_grad_(False)
        self.device = device

    @torch.no_grad()
    def update(self, model, decay):
        for kept, p in zip(self.shadow.parameters(), model.parameters()):
            kept.lerp_(p.to(self.device), 1 - decay)


model = GPT(args.width, args.depth).cuda()
ema = Average(model.cpu(), "cpu") if args.ema_on == "cpu" else Average(model, "cuda")
model.cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for step in range(3):
    ids = torch.randint(0, 32000, (args.batch_size, 513), device="cuda")
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1))
    del logits
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ema.update(model, args.decay)
    print(f"step {step}: {loss.item():.3f}")
torch.save(ema.shadow.state_dict(), "ema.pt")
