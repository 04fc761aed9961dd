"""Pictures cut into five views (anyres: the whole and four crops) for a tower that was made for two."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

SIZE = 8
FIXED = "fixed" in sys.argv


class TwoViews(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 6, 4, stride=4)
        self.head = nn.Linear(12, 4)

    def forward(self, images):
        if images.shape[1] != 2:
            raise ValueError(f"expects 2 views, got {images.shape[1]} in {images.shape}")  # where
        tokens = self.patch(images.flatten(0, 1)).mean((2, 3))
        return self.head(tokens.unflatten(0, (-1, 2)).flatten(1))


def anyres(picture):
    whole = nn.functional.interpolate(picture[None], (SIZE, SIZE))[0]
    crops = [picture[:, top : top + SIZE, left : left + SIZE] for top in (0, SIZE) for left in (0, SIZE)]
    if FIXED:
        crops = [picture[:, SIZE // 2 : SIZE // 2 + SIZE, SIZE // 2 : SIZE // 2 + SIZE]]
    return torch.stack([whole, *crops])  # cause


rows = [(anyres(torch.rand(3, 2 * SIZE, 2 * SIZE)), n % 4) for n in range(8)]
model = TwoViews().cuda()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for images, label in DataLoader(rows, batch_size=4):
    loss = nn.functional.cross_entropy(model(images.cuda()), label.cuda())
    opt.zero_grad()
    loss.backward()
    opt.step()
print("done", loss.item())
