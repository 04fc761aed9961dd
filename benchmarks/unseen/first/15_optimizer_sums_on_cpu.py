import torch
from torch import nn
from torch.optim.optimizer import Optimizer


class Adapt(Optimizer):
    """SGD whose rate follows the agreement of gradients."""

    def __init__(self, params, lr=1.0, d0=1e-2):
        super().__init__(params, dict(lr=lr, d=d0))

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        d_numerator = torch.tensor([0.0])
        d_denominator = torch.tensor([0.0])
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["p0"] = p.detach().clone()
                state["s"] = torch.zeros_like(p)
            d_numerator.add_((p.grad * (state["p0"] - p)).sum())
            state["s"].add_(p.grad, alpha=group["d"])
            d_denominator.add_(state["s"].abs().sum())
        group["d"] = max(group["d"], (d_numerator / d_denominator.clamp(min=1e-8)).item())
        for p in group["params"]:
            if p.grad is not None:
                p.add_(p.grad, alpha=-group["lr"] * group["d"])


model = nn.Linear(7, 2).cuda()
optimizer = Adapt(model.parameters())
for _ in range(3):
    loss = model(torch.randn(9, 7).cuda()).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
