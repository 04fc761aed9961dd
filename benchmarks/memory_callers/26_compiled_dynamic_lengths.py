"""One's own decoder with rotary places, the whole of it by torch.compile(dynamic=True), batches of another length each."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

DIM, LAYERS, HEADS, VOCAB = 1536, 8, 12, 50304
BATCH, LENGTHS = 12, (1100, 700, 1536, 900, 1300)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.gate, self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, HEADS, -1).transpose(1, 3).unbind(2)

        def turn(y):
            left, right = y.chunk(2, -1)
            return torch.cat([left * cos - right * sin, left * sin + right * cos], -1).to(v.dtype)

        y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, DIM))
        y = self.n2(x)
        return x + self.down(F.gelu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        half = DIM // HEADS // 2
        self.register_buffer("speeds", 10000.0 ** (-torch.arange(half) / half), persistent=False)

    def forward(self, ids, labels):
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * self.speeds
        cos, sin = angles.cos(), angles.sin()
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)


torch.manual_seed(8)
torch.set_float32_matmul_precision("high")
with torch.device("cuda"):
    model = Decoder()
decay = [p for p in model.parameters() if p.dim() > 1]
rest = [p for p in model.parameters() if p.dim() == 1]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=3e-4, fused=True)
compiled = torch.compile(model, dynamic=True)
for step, length in enumerate(LENGTHS):
    ids = torch.randint(0, VOCAB, (BATCH, length + 1), device="cuda")
    labels = ids[:, 1:].clone()
    labels[0, length // 2 :] = -100
    with torch.autocast("cuda", torch.bfloat16):
        loss = compiled(ids[:, :-1].contiguous(), labels)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, length, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
