import os
import tempfile
import torch
from torch import nn


def checkpoint():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    path = os.path.join(tempfile.mkdtemp(), "last.pth")
    torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}, path)
    return path


def main(resume):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saved = torch.load(resume, map_location=torch.device("cpu"))
    model.load_state_dict(saved["state_dict"])
    optimizer.load_state_dict(saved["optimizer"])
    model = model.cuda()
    for epoch in range(saved["epoch"], 4):
        loss = model(torch.randn(3, 4).cuda()).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main(checkpoint())
