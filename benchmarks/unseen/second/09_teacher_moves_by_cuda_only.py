import torch
import torch.nn.functional as F
from torch import nn


def make_backbone(width):
    return nn.Sequential(nn.Conv2d(3, width, 3, stride=2, padding=1), nn.ReLU(),
                         nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class KnowledgeDistiller(nn.Module):
    """Student with a frozen teacher, which stays out of the checkpoint."""

    def __init__(self, student, teacher, temperature=4.0, alpha=0.7):
        super().__init__()
        self.student = student
        teacher.eval().requires_grad_(False)
        object.__setattr__(self, "teacher_model", teacher)
        self.temperature, self.alpha = temperature, alpha

    def cuda(self, device=None):
        self.teacher_model.cuda(device=device)
        return super().cuda(device=device)

    def train(self, mode=True):
        self.teacher_model.train(False)
        return super().train(mode)

    def forward(self, images, labels):
        logits = self.student(images)
        with torch.no_grad():
            soft = self.teacher_model(images)
        T = self.temperature
        kd = F.kl_div(F.log_softmax(logits / T, 1), F.softmax(soft / T, 1), reduction="batchmean") * T * T
        return self.alpha * kd + (1 - self.alpha) * F.cross_entropy(logits, labels)


def main():
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = KnowledgeDistiller(make_backbone(8), make_backbone(32))
    model.to(device)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(6):
        images = torch.randn(8, 3, 32, 32, device=device)
        labels = torch.randint(0, 10, (8,), device=device)
        loss = model(images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, round(loss.item(), 4))


main()
