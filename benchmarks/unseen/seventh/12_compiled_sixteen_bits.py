"""3.2B GPT, blocks compiled one by one, an Adam that lives in bfloat16 and rounds stochastically; saved and gone on from."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

V, D, L, H = 50304, 3072, 26, 24


class Bf16Adam(Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.95), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["t"], s["m"], s["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                s["t"] += 1
                s["m"].lerp_(p.grad, 1 - b1)
                s["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                root = s["v"].float().div_(1 - b2 ** s["t"]).sqrt_().add_(group["eps"])
                new = p.float().addcdiv_(s["m"].float(), root, value=-group["lr"] / (1 - b1 ** s["t"]))
                del root
                bits = new.view(torch.int32)
                bits += torch.randint_like(bits, 0, 1 << 16)
                bits &= -65536
                p.copy_(new)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D, bias=False), nn.LayerNorm(D, bias=False)
        self.qkv, self.o = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.fc, self.pr = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, H, D // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, D))
        return x + self.pr(F.relu(self.fc(self.ln2(x))).square())


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, D), nn.Embedding(1024, D)
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.out = nn.Linear(D, V, bias=False)

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for b in self.blocks:
            x = b(x)
        return F.cross_entropy(self.out(x).flatten(0, 1).float(), targets.flatten())


def steps(model, optimizer, n):
    for _ in range(n):
        ids = torch.randint(0, V, (4, 1025), device="cuda")
        model(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


model = GPT().to(device="cuda", dtype=torch.bfloat16)
for block in model.blocks:
    block.compile()
optimizer = Bf16Adam(model.parameters(), lr=3e-4)
steps(model, optimizer, 2)
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "state.pt")
optimizer = Bf16Adam(model.parameters(), lr=3e-4)
state = torch.load("state.pt", map_location="cpu")
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
del state
steps(model, optimizer, 1)
print(torch.cuda.max_memory_allocated() / 2**30)
