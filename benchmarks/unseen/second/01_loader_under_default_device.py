import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)
if torch.cuda.is_available():
    torch.set_default_device("cuda")


class ActionnessNet(nn.Module):
    def __init__(self, len_feature=32, num_classes=4):
        super().__init__()
        self.embed = nn.Conv1d(len_feature, 64, 3, padding=1)
        self.actionness = nn.Conv1d(64, num_classes, 1)

    def forward(self, x):
        x = F.relu(self.embed(x.transpose(1, 2)))
        cas = self.actionness(x)
        top, _ = cas.topk(5, dim=2)
        return top.mean(2)


def get_loader(n=64, batch_size=16):
    feats = torch.randn(n, 20, 32)
    labels = (feats.mean((1, 2)) > 0).long()
    return DataLoader(TensorDataset(feats, labels), batch_size=batch_size, shuffle=True)


def main():
    net = ActionnessNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.9, 0.999))
    loader = get_loader()
    loader_iter = iter(loader)
    for step in range(8):
        try:
            feats, labels = next(loader_iter)
        except StopIteration:
            loader_iter = iter(loader)
            feats, labels = next(loader_iter)
        loss = F.cross_entropy(net(feats), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
