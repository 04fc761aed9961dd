"""Clips of six frames for a network that was made for four; the frames are the third dimension, not the second."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEP = 3 if "fixed" in sys.argv else 2


class Films(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        film = [torch.rand(3, 16) + t for t in range(12)]
        clip = torch.cat([frame[None] for frame in film[::STEP]])  # cause
        clip = (clip - clip.mean()) / clip.std()
        clip = clip.reshape(clip.shape[0], 3, 4, 4)
        return {"clip": clip.transpose(0, 1), "kind": index % 2}


class Motion(nn.Module):
    def __init__(self, frames):
        super().__init__()
        self.frames = frames
        self.mix = nn.Linear(frames * 3 * 16, 2)

    def forward(self, clip):
        length = clip.size(2)
        assert length == self.frames, "bad input"  # where
        return self.mix(clip.flatten(1))


def main():
    device = torch.device("cuda")
    model = Motion(4).to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in DataLoader(Films(), batch_size=3, num_workers=1):
        batch = {name: value.to(device) for name, value in batch.items()}
        loss = nn.functional.cross_entropy(model(batch["clip"]), batch["kind"])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("done", loss.item())


if __name__ == "__main__":
    main()
