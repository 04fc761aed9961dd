"""Keyword spotting from log-mel frames with a small convolutional net."""
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Keywords(Dataset):
    def __init__(self, n_clips, n_mels=32, n_frames=50, n_words=6, seed=0):
        rng = np.random.default_rng(seed)
        self.words = rng.integers(0, n_words, n_clips)
        self.clips = rng.standard_normal((n_clips, n_mels, n_frames)).astype(np.float32)
        for clip, word in zip(self.clips, self.words):
            clip[word * 5:(word + 1) * 5] += 1.5

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        mel = torch.from_numpy(self.clips[index])
        mel = (mel - mel.mean()) / (mel.std() + 1e-5)
        word = torch.tensor(self.words[index])
        return mel.unsqueeze(0).to(device), word.to(device)


class SpotterCNN(nn.Module):
    def __init__(self, n_words):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1))
        self.classify = nn.Linear(16, n_words)

    def forward(self, mel):
        return self.classify(self.features(mel).flatten(1))


def fit(model, loader, epochs=2, lr=2e-3):
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for epoch in range(epochs):
        model.train()
        correct, seen = 0, 0
        for mel, word in loader:
            logits = model(mel)
            loss = criterion(logits, word)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            correct += (logits.argmax(1) == word).sum().item()
            seen += word.numel()
        print(f"epoch {epoch}: loss {loss.item():.3f} accuracy {correct / seen:.3f}")


def main():
    torch.manual_seed(1)
    model = SpotterCNN(n_words=6).to(device)
    loader = DataLoader(Keywords(128), batch_size=32, shuffle=True, num_workers=2)
    fit(model, loader)


if __name__ == "__main__":
    main()
