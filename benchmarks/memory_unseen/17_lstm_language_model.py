"""An LSTM language model with tied weights and truncated back-propagation, plain SGD."""
import json

import torch
import torch.nn as nn

VOCAB, DIM, LAYERS, BPTT, BATCH = 33278, 1024, 3, 128, 128


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.encoder = nn.Embedding(VOCAB, DIM)
        self.rnn = nn.LSTM(DIM, DIM, LAYERS, dropout=0.5)
        self.decoder = nn.Linear(DIM, VOCAB)
        self.decoder.weight = self.encoder.weight

    def forward(self, x, hidden):
        out, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
        return self.decoder(self.drop(out)).view(-1, VOCAB), hidden

    def start(self, n):
        w = next(self.parameters())
        return w.new_zeros(LAYERS, n, DIM), w.new_zeros(LAYERS, n, DIM)


data = torch.randint(0, VOCAB, (4 * BPTT + 1, BATCH)).cuda()
model = LM().cuda()
criterion = nn.CrossEntropyLoss()
lr = 20.0
hidden = model.start(BATCH)
model.train()
for i in range(0, data.size(0) - 1, BPTT):
    x, y = data[i:i + BPTT], data[i + 1:i + 1 + BPTT].reshape(-1)
    hidden = tuple(h.detach() for h in hidden)
    model.zero_grad()
    output, hidden = model(x, hidden)
    loss = criterion(output, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-lr)
    print(i, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
