import torch
import torch.nn.functional as F
from torch import nn


class LowMemoryLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.matmul(weight.t())

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        grad_x = grad_output.matmul(weight)
        grad_weight = grad_output.t().matmul(x)
        return grad_x, grad_weight


class Projection(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, inp) / inp ** 0.5)

    def forward(self, x):
        return LowMemoryLinear.apply(x, self.weight)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.proj = Projection(24, 48)
        self.head = nn.Linear(48, 5)

    def forward(self, x):
        return self.head(F.relu(self.proj(self.norm(x))))


def main():
    torch.manual_seed(1)
    net = Net().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    for i in range(6):
        x = torch.randn(16, 24).cuda()
        y = torch.randint(0, 5, (16,)).cuda()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(i, loss.item())


main()
