import torch
from torch import nn
from torch.utils import data


class DummyDataset(data.Dataset):
    def __init__(self, num_classes):
        super().__init__()
        self.tensor = torch.randn(3, 8, 8, device=torch.device("cuda"))
        self.num_classes = num_classes

    def __getitem__(self, index):
        return self.tensor + index, index % self.num_classes

    def __len__(self):
        return 16


def main():
    loader = data.DataLoader(DummyDataset(4), batch_size=4, shuffle=True, num_workers=2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4)).cuda()
    criterion = nn.CrossEntropyLoss().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for images, target in loader:
        output = model(images.cuda(non_blocking=True))
        loss = criterion(output, target.cuda(non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
