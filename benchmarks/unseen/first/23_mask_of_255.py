import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Vessels(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        image = torch.rand(1, 8, 8)
        mask = torch.where(image[0] > 0.5, 255, 0)
        return image, mask


def main(nclass=2):
    device = torch.device("cuda")
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, nclass, 1)).to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for image, mask in DataLoader(Vessels(), batch_size=4):
        loss = criterion(model(image.to(device)), mask.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
