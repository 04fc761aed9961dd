import torch
import torch.nn.functional as F
from torch import nn


class LeNet(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.fc1 = nn.Linear(100, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, 10)

    def forward(self, x):
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


@torch.no_grad()
def shrink(layer, keep_out=None, keep_in=None):
    weight, bias = layer.weight, layer.bias
    if keep_out is not None:
        weight, bias = weight[keep_out], bias[keep_out]
    if keep_in is not None:
        weight = weight[:, keep_in]
    new = nn.Linear(weight.size(1), weight.size(0)).to(weight.device)
    new.weight.copy_(weight)
    new.bias.copy_(bias)
    return new


def speedup_model(model, sparsity=0.5):
    keep1 = model.fc1.weight.norm(dim=1).topk(int(model.fc1.out_features * (1 - sparsity))).indices
    keep2 = model.fc2.weight.norm(dim=1).topk(int(model.fc2.out_features * (1 - sparsity))).indices
    model.fc1 = shrink(model.fc1, keep1)
    model.fc2 = shrink(model.fc2, keep2, keep1)
    model.fc3 = shrink(model.fc3, None, keep2)


def run_epoch(model, optimizer, device, steps=10):
    for _ in range(steps):
        x = torch.randn(32, 100, device=device)
        y = x[:, :10].argmax(1)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    device = torch.device("cuda")
    torch.manual_seed(0)
    model = LeNet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        print("pretrain", epoch, run_epoch(model, optimizer, device))
    speedup_model(model)
    for epoch in range(3):
        print("finetune", epoch, run_epoch(model, optimizer, device))


if __name__ == "__main__":
    main()
