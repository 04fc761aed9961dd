import torch
from torch import nn
from torch.utils.data import DataLoader


class Collator:
    def __call__(self, rows):
        return {
            "input_features": torch.stack([row["features"] for row in rows]),
            "labels": torch.tensor([row["label"] for row in rows]),
        }


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(8, 16, 3, padding=1)
        self.head = nn.Linear(16, 5)

    def forward(self, input_features):
        return self.head(nn.functional.gelu(self.conv(input_features)).mean(-1))


device = torch.device("cuda")
model = Encoder().to(device, torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
rows = [{"features": torch.randn(8, 20), "label": i % 5} for i in range(12)]
for batch in DataLoader(rows, batch_size=4, collate_fn=Collator()):
    logits = model(batch["input_features"].to(device))
    loss = nn.functional.cross_entropy(logits.float(), batch["labels"].to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
