"""A click model: embedding bags with sparse gradients, SparseAdam for them, Adam for the rest."""
import json

import torch
import torch.nn as nn

TABLES, ROWS, DIM, BATCH, HOT = 12, 400_000, 64, 8192, 8


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True) for _ in range(TABLES))
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, DIM), nn.ReLU())
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(nn.Linear(DIM + pairs, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(),
                                 nn.Linear(512, 1))
        self.register_buffer("at", torch.tril_indices(TABLES + 1, TABLES + 1, -1), persistent=False)

    def forward(self, dense, ids):
        x = self.bottom(dense)
        features = torch.stack([x] + [table(ids[:, k]) for k, table in enumerate(self.tables)], 1)
        crossed = torch.bmm(features, features.transpose(1, 2))[:, self.at[0], self.at[1]]
        return self.top(torch.cat([x, crossed], 1)).squeeze(1)


model = Clicks().to("cuda")
tables = [p for n, p in model.named_parameters() if "tables" in n]
dense = [p for n, p in model.named_parameters() if "tables" not in n]
opts = [torch.optim.SparseAdam(tables, lr=1e-3), torch.optim.Adam(dense, lr=1e-3)]
for step in range(4):
    numbers = torch.randn(BATCH, 13, device="cuda")
    ids = torch.randint(0, ROWS, (BATCH, TABLES, HOT), device="cuda")
    clicked = torch.randint(0, 2, (BATCH,), device="cuda").float()
    loss = nn.functional.binary_cross_entropy_with_logits(model(numbers, ids), clicked)
    for o in opts:
        o.zero_grad()
    loss.backward()
    for o in opts:
        o.step()
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
