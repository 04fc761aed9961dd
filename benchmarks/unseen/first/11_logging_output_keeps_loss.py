import torch
from torch import nn


class MaskedCriterion:
    def __call__(self, model, sample):
        logits = model(sample["tokens"])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), sample["target"].flatten(), reduction="sum")
        logging_output = {
            "loss": loss,
            "ntokens": sample["target"].numel(),
            "sample_size": len(sample["target"]),
        }
        return loss, logging_output


class Trainer:
    def __init__(self, model, criterion):
        self.model, self.criterion = model, criterion
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.history = []

    def step(self, sample):
        loss, log = self.criterion(self.model, sample)
        self.optimizer.zero_grad()
        (loss / log["ntokens"]).backward()
        self.optimizer.step()
        self.history.append(log)


model = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 30)).to("cuda")
trainer = Trainer(model, MaskedCriterion())
for _ in range(8):
    tokens = torch.randint(0, 30, (4, 6), device="cuda")
    trainer.step({"tokens": tokens, "target": tokens})
print(sum(float(log["loss"]) for log in trainer.history))
