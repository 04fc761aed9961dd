"""A reversible decoder: no layer keeps its input, the backward pass computes it from its output; custom autograd, dropout replayed."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

DIM, LAYERS, HEADS, VOCAB, DROP = 1536, 40, 16, 32000, 0.1
BATCH, LENGTH, STEPS = 12, 2048, 3


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.dropout(self.out(y.transpose(1, 2).reshape(b, t, DIM)), DROP, self.training)


class Feed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM), nn.Dropout(DROP))


class Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, pairs):
        ctx.pairs, ctx.states = pairs, []
        for attend, feed in pairs:
            before = torch.cuda.get_rng_state()
            a = a + attend(b)
            ctx.states.append((before, torch.cuda.get_rng_state()))
            b = b + feed(a)
        ctx.save_for_backward(a, b)
        return a, b

    @staticmethod
    def again(part, x, state, gradient):
        """What `part` gave for x, and the gradient of x; those of its weights are added to `.grad`."""
        torch.cuda.set_rng_state(state)
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = part(x)
        torch.autograd.backward(y, gradient)
        return y.detach(), x.grad

    @staticmethod
    def backward(ctx, da, db):
        a, b = ctx.saved_tensors
        now = torch.cuda.get_rng_state()
        for (attend, feed), (first, second) in zip(reversed(ctx.pairs), reversed(ctx.states)):
            y, more = Reversible.again(feed, a, second, db)
            b, da = b - y, da + more
            y, more = Reversible.again(attend, b, first, da)
            a, db = a - y, db + more
        torch.cuda.set_rng_state(now)
        return da, db, None


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.attend = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.feed = nn.ModuleList(Feed() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(2 * DIM), nn.Linear(2 * DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        a, b = Reversible.apply(x, x.clone(), list(zip(self.attend, self.feed)))
        return self.head(self.norm(torch.cat([a, b], -1)))


torch.manual_seed(8)
with torch.device("cuda"):
    model = Decoder().to(torch.bfloat16)
optimizer = torch.optim.RAdam(model.parameters(), lr=2e-4, weight_decay=0.01, decoupled_weight_decay=True)
for step in range(STEPS):
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), device="cuda")
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(step, loss.item(), norm.item(), torch.cuda.memory_allocated() >> 20, "MiB")
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
