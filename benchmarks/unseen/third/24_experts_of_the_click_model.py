"""Mixture-of-experts ranker with two tasks: click and conversion."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

config = {"fields": [50, 20, 8], "emb": 8, "experts": 4, "expert_dim": 24,
          "tasks": ["click", "buy"], "lr": 1e-3, "batch": 64, "epochs": 2, "seed": 2021}


def mlp(sizes):
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers)


class MMoE(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(n, cfg["emb"]) for n in cfg["fields"]])
        width = cfg["emb"] * len(cfg["fields"])
        self.experts = [mlp([width, 32, cfg["expert_dim"]]) for _ in range(cfg["experts"])]
        self.gates = nn.ModuleDict({t: nn.Linear(width, cfg["experts"]) for t in cfg["tasks"]})
        self.towers = nn.ModuleDict({
            t: nn.Sequential(mlp([cfg["expert_dim"], 16]), nn.Linear(16, 1))
            for t in cfg["tasks"]})

    def forward(self, ids):
        x = torch.cat([emb(ids[:, i]) for i, emb in enumerate(self.embeddings)], dim=1)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        scores = {}
        for task, gate in self.gates.items():
            weights = gate(x).softmax(dim=1).unsqueeze(-1)
            scores[task] = self.towers[task]((weights * outputs).sum(dim=1)).squeeze(1)
        return scores


def impressions(n, cfg):
    ids = torch.stack([torch.randint(0, size, (n,)) for size in cfg["fields"]], dim=1)
    click = ((ids[:, 0] + ids[:, 1]) % 3 == 0).float()
    buy = click * (ids[:, 2] > 4).float()
    return TensorDataset(ids, click, buy)


def run(cfg):
    torch.manual_seed(cfg["seed"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(impressions(256, cfg), batch_size=cfg["batch"], shuffle=True)
    model = MMoE(cfg).to(device)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
    for epoch in range(cfg["epochs"]):
        model.train()
        running = 0.0
        for ids, click, buy in loader:
            ids, click, buy = ids.to(device), click.to(device), buy.to(device)
            scores = model(ids)
            loss = criterion(scores["click"], click) + criterion(scores["buy"], buy)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item()
        print(f"epoch {epoch}: {running / len(loader):.4f}")


if __name__ == "__main__":
    run(config)
