import torch
from torch import nn


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(10, 32)
        self.tokens = nn.Linear(32, 12)

    def forward(self, frames):
        return self.tokens(self.encode(frames).relu()).log_softmax(-1)


def batch(device):
    frames = torch.randn(2, 20, 10, device=device, dtype=torch.half)
    targets = torch.randint(1, 12, (2, 5), device=device)
    return frames, targets, torch.full((2,), 20), torch.full((2,), 5)


def main():
    device = torch.device("cuda")
    model = Recogniser().to(device).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        frames, targets, frame_lengths, target_lengths = batch(device)
        log_probs = model(frames).transpose(0, 1)
        loss = nn.functional.ctc_loss(log_probs, targets, frame_lengths, target_lengths)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
