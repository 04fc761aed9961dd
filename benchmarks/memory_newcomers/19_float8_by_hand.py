"""A tall MLP whose linear layers multiply in float8 by torch._scaled_mm, a custom autograd.Function, foreach AdamW."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

ROWS, DIM, WIDE, LAYERS, CLASSES, STEPS = 16384, 4096, 16384, 6, 1000, 4
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def to_float8(x, dtype):
    scale = torch.finfo(dtype).max / x.abs().amax().float().clamp(min=1e-12)
    return (x.float() * scale).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype), scale.reciprocal()


def mm(a, b, a_type, b_type):
    """a @ b.T, both row-major."""
    a8, sa = to_float8(a, a_type)
    b8, sb = to_float8(b, b_type)
    return torch._scaled_mm(a8, b8.t(), scale_a=sa, scale_b=sb, out_dtype=torch.bfloat16, use_fast_accum=True)


class Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return mm(x, w, E4M3, E4M3)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        dx = mm(grad.contiguous(), w.t().contiguous(), E5M2, E4M3)
        dw = mm(grad.t().contiguous(), x.t().contiguous(), E5M2, E4M3)
        return dx, dw


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.up = nn.Parameter(torch.randn(WIDE, DIM) * 0.01)
        self.down = nn.Parameter(torch.randn(DIM, WIDE) * 0.01)

    def forward(self, x):
        h = F.silu(Float8Linear.apply(self.norm(x), self.up))
        return x + Float8Linear.apply(h, self.down)


model = nn.Sequential(*(Layer() for _ in range(LAYERS)), nn.Linear(DIM, CLASSES)).to("cuda", torch.bfloat16)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
for step in range(STEPS):
    x = torch.randn(ROWS, DIM, device="cuda", dtype=torch.bfloat16)
    y = torch.randint(0, CLASSES, (ROWS,), device="cuda")
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
