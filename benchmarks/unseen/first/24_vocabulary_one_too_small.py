import torch
from torch import nn

token_maps = {word: {"token": number} for number, word in enumerate("the cat sat on a mat".split())}
vocab_size = max(entry["token"] for entry in token_maps.values())


class MultiTask(nn.Module):
    def __init__(self, phonemes, vocab_size):
        super().__init__()
        self.embed = nn.Embedding(phonemes, 16)
        self.word = nn.Linear(16, vocab_size)

    def forward(self, x):
        return self.word(self.embed(x))


model = MultiTask(40, vocab_size).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    phonemes = torch.randint(0, 40, (3, 6)).cuda()
    words = torch.tensor([[entry["token"] for entry in token_maps.values()]] * 3).cuda()
    loss = nn.functional.cross_entropy(model(phonemes).transpose(1, 2), words)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
