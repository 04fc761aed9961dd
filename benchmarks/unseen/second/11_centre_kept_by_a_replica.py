import copy

import torch
import torch.nn.functional as F
from torch import nn


class SelfDistill(nn.Module):
    def __init__(self, dim=32, out=16, momentum=0.9):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, out))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.momentum = momentum
        self.register_buffer("center", torch.zeros(1, out))

    @torch.no_grad()
    def update_center(self, output):
        self.center = self.center * self.momentum + output.mean(0, keepdim=True) * (1 - self.momentum)

    def forward(self, view1, view2):
        with torch.no_grad():
            target = self.teacher(view1)
            probs = F.softmax((target - self.center) / 0.04, dim=-1)
        loss = -(probs * F.log_softmax(self.student(view2) / 0.1, dim=-1)).sum(-1)
        if self.training:
            self.update_center(target)
        return loss


@torch.no_grad()
def update_teacher(module, m=0.99):
    for ps, pt in zip(module.student.parameters(), module.teacher.parameters()):
        pt.mul_(m).add_(ps, alpha=1 - m)


def main():
    torch.manual_seed(0)
    net = SelfDistill().cuda()
    model = nn.DataParallel(net, device_ids=[0, 1])
    optimizer = torch.optim.AdamW(net.student.parameters(), lr=1e-3)
    images = torch.randn(64, 32) + 0.5
    for step in range(12):
        batch = images[torch.randint(0, 64, (16,))].cuda()
        loss = model(batch + 0.1 * torch.randn_like(batch), batch + 0.1 * torch.randn_like(batch)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_teacher(net)
        print(f"step {step} loss {loss.item():.4f} center {net.center.norm().item():.4f}")


if __name__ == "__main__":
    main()
