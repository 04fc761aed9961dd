"""1.4B from scratch: torch.optim.Muon for what is a matrix inside, AdamW for the rest."""
import torch
import torch.nn.functional as F
from torch import nn

V, D, L, H, T, B = 50304, 2048, 24, 16, 1024, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1 = nn.LayerNorm(D, bias=False)
        self.ln2 = nn.LayerNorm(D, bias=False)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.proj = nn.Linear(D, D, bias=False)
        self.fc = nn.Linear(D, 4 * D, bias=False)
        self.back = nn.Linear(4 * D, D, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.ln1(x)).split(D, dim=2)
        q, k, v = (z.view(B, -1, H, D // H).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(B, -1, D))
        return x + self.back(F.gelu(self.fc(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(V, D)
        self.wpe = nn.Embedding(T, D)
        self.h = nn.ModuleList([Block() for _ in range(L)])
        self.ln = nn.LayerNorm(D, bias=False)
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1), device=ids.device))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(self.ln(x)).view(-1, V), targets.view(-1))


model = GPT().cuda()
inner = [w for w in model.h.parameters() if w.ndim == 2]
chosen = {id(w) for w in inner}
outer = [w for w in model.parameters() if id(w) not in chosen]
optimizers = [
    torch.optim.Muon(inner, lr=0.02, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
    torch.optim.AdamW(outer, lr=3e-4, betas=(0.9, 0.95), fused=True),
]
schedules = [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 10) for o in optimizers]

for step in range(3):
    batch = torch.randint(0, V, (B, T + 1)).pin_memory().to("cuda", non_blocking=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(batch[:, :-1], batch[:, 1:].contiguous())
    loss.backward()
    for o, s in zip(optimizers, schedules):
        o.step()
        s.step()
        o.zero_grad(set_to_none=True)
    print(f"{step} {loss.item():.4f}")
torch.save({"model": model.state_dict(), "opts": [o.state_dict() for o in optimizers]}, "gpt.pt")
