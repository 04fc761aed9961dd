"""Names out of a hostile config: modules, a class, a metric, an error text."""
import torch
from torch import nn

NASTY = '<img src=x onerror=alert(1)>\x1b[31m\n::error::{{7*7}}‮'
Layer = type("L<script>alert(1)</script>", (nn.Linear,), {})
net = nn.ModuleDict({'a"><b>': Layer(64, 64), NASTY.replace(".", ""): nn.Linear(64, 64)}).cuda()
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
x = torch.randn(4, 64, device="cuda")
for layer in net.values():
    x = layer(x)
x.sum().backward()
opt.step()
print(NASTY)
raise ValueError(f"bad key {NASTY}")
