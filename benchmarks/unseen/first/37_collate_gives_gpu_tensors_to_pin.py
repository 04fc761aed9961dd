import torch
from torch import nn
from torch.utils.data import DataLoader


def pad_collate(rows):
    tokens, labels = zip(*rows)
    padded = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    return padded.cuda(), torch.tensor(labels).cuda()


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.conv = nn.Conv1d(8, 16, 3, padding=1)
        self.out = nn.Linear(8, 2)

    def forward(self, tokens):
        value, gate = self.conv(self.embed(tokens).transpose(1, 2)).chunk(2, 1)
        return self.out((value * gate.sigmoid()).amax(-1))


rows = [(torch.randint(0, 30, (4 + i % 3,)), i % 2) for i in range(12)]
loader = DataLoader(rows, batch_size=4, collate_fn=pad_collate, pin_memory=True)
model = Gated().cuda()
optimizer = torch.optim.Adam(model.parameters())
for tokens, labels in loader:
    loss = nn.functional.cross_entropy(model(tokens.cuda()), labels.cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
