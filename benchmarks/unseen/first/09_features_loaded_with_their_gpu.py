import os
import tempfile
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

path = os.path.join(tempfile.mkdtemp(), "features.pt")
torch.save({"x": torch.randn(24, 5, device="cuda"), "y": torch.randint(0, 3, (24,), device="cuda")}, path)


class Features(Dataset):
    def __init__(self, path):
        stored = torch.load(path)
        self.x, self.y = stored["x"], stored["y"]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index] * 2, self.y[index]


model = nn.Linear(5, 3).cuda()
optimizer = torch.optim.Adam(model.parameters())
for x, y in DataLoader(Features(path), batch_size=6, num_workers=2):
    loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
