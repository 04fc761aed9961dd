"""A decoder with a window given as a mask, blocks checkpointed, cross-entropy in chunks by hand, SOAP written out."""
import json
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

DIM, LAYERS, HEADS, VOCAB, WINDOW = 1024, 16, 16, 50304, 1024
BATCH, LENGTH, CHUNK, STEPS = 6, 4096, 4096, 4


class SOAP(torch.optim.Optimizer):
    """Adam in the eigenbasis of Shampoo's preconditioners; sides longer than `limit` are left as they are."""

    def __init__(self, params, lr=3e-3, betas=(0.95, 0.95), eps=1e-8, every=2, limit=1024):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "every": every, "limit": limit})

    def turn(self, g, bases, back=False):
        for side, q in enumerate(bases):
            if q is not None:
                g = torch.tensordot(g, q, dims=[[0], [1 if back else 0]])
            else:
                g = g.movedim(0, -1)
        return g

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                g, state = p.grad, self.state[p]
                sides = range(p.dim()) if p.dim() == 2 else ()
                if not state:
                    state["step"] = 0
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["gg"] = [torch.zeros(n, n, device=p.device) if n <= group["limit"] and len(sides) else None for n in p.shape]
                    self.gather(state, g, b2)
                    state["q"] = [None if s is None else torch.linalg.eigh(s + 1e-12 * torch.eye(len(s), device=s.device))[1].flip(1)
                                  for s in state["gg"]]
                    continue
                state["step"] += 1
                t = state["step"]
                turned = self.turn(g, state["q"]) if len(sides) else g
                state["m"].lerp_(g, 1 - b1)
                state["v"].mul_(b2).addcmul_(turned, turned, value=1 - b2)
                m = self.turn(state["m"], state["q"]) if len(sides) else state["m"]
                update = m / (state["v"].sqrt() + group["eps"])
                update = self.turn(update, state["q"], back=True) if len(sides) else update
                p.add_(update, alpha=-group["lr"] * math.sqrt(1 - b2**t) / (1 - b1**t))
                self.gather(state, g, b2)
                if t % group["every"] == 0:
                    state["q"] = [None if q is None else torch.linalg.qr(s @ q)[0] for s, q in zip(state["gg"], state["q"])]

    def gather(self, state, g, b2):
        for side, s in enumerate(state["gg"]):
            if s is not None:
                s.lerp_(g @ g.t() if side == 0 else g.t() @ g, 1 - b2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x, mask):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, DIM))
        return x + self.down(F.relu(self.up(self.n2(x))).square())


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)

    def forward(self, ids):
        at = torch.arange(ids.shape[1], device=ids.device)
        far = at[:, None] - at[None, :]
        mask = (far >= 0) & (far < WINDOW)
        x = self.words(ids) + self.places(at)
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False)
        return self.norm(x)


def piece(hidden, weight, labels):
    return F.cross_entropy((hidden @ weight.t()).float(), labels, reduction="sum")


torch.manual_seed(4)
model = Decoder().cuda()
matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "blocks" in n]
others = [p for n, p in model.named_parameters() if not (p.dim() == 2 and "blocks" in n)]
optimizers = [SOAP(matrices), torch.optim.Adam(others, lr=3e-4)]
for step in range(STEPS):
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        hidden = model(ids)[:, :-1].reshape(-1, DIM)
        labels, loss = ids[:, 1:].reshape(-1), 0.0
        for h, y in zip(hidden.split(CHUNK), labels.split(CHUNK)):
            loss = loss + checkpoint(piece, h, model.words.weight, y, use_reentrant=False)
        loss = loss / labels.numel()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
