"""nn.TransformerEncoder with padding masks: trained by RAdam, then evaluated on the nested fast path."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, DIM, HEADS, LAYERS, CLASSES = 30000, 1024, 16, 12, 20
BATCH, LENGTH, STEPS, EVALS = 32, 512, 3, 4


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, padding_idx=0)
        self.position = nn.Parameter(torch.randn(1, LENGTH, DIM) * 0.02)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 4 * DIM, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=True)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, ids):
        pad = ids == 0
        x = self.embed(ids) + self.position[:, :ids.size(1)]
        return self.head(self.encoder(x, src_key_padding_mask=pad)[:, 0])


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (BATCH, LENGTH), generator=g)
    n = torch.randint(LENGTH // 4, LENGTH + 1, (BATCH, 1), generator=g)
    n[0] = LENGTH
    ids[torch.arange(LENGTH) >= n] = 0
    return ids.to("cuda"), torch.randint(0, CLASSES, (BATCH,), generator=g).to("cuda")


model = Classifier().to("cuda")
opt = torch.optim.RAdam(model.parameters(), lr=1e-4, decoupled_weight_decay=True, weight_decay=0.01)
for step in range(STEPS):
    model.train()
    ids, y = batch(step)
    loss = F.cross_entropy(model(ids), y, label_smoothing=0.1)
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(step, loss.item())
model.eval()
with torch.inference_mode():
    right = 0
    for i in range(EVALS):
        ids, y = batch(100 + i)
        right += (model(ids).argmax(-1) == y).sum().item()
    print(right / (BATCH * EVALS))
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
