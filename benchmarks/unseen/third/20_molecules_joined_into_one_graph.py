import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

CONFIG = {"graphs": 64, "batch_size": 16, "hidden": 32, "epochs": 2, "lr": 1e-2, "seed": 13}


class Molecules(Dataset):
    """Random trees; the target is the mean squared degree."""

    def __init__(self, n):
        g = torch.Generator().manual_seed(0)
        self.items = [self.build(g) for _ in range(n)]

    @staticmethod
    def build(g):
        nodes = int(torch.randint(5, 12, (1,), generator=g))
        parent = [int(torch.randint(0, i, (1,), generator=g)) for i in range(1, nodes)]
        edges = torch.tensor([list(range(1, nodes)), parent])
        edges = torch.cat([edges, edges.flip(0)], dim=1)
        degree = torch.bincount(edges[1], minlength=nodes).float()
        x = torch.cat([torch.ones(nodes, 1), torch.randn(nodes, 3, generator=g)], dim=1)
        return {"x": x, "edge_index": edges, "y": (degree**2).mean() / 4}

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(graphs):
    sizes = torch.tensor([g["x"].size(0) for g in graphs])
    x = torch.cat([g["x"] for g in graphs])
    edge_index = torch.cat([g["edge_index"] for g in graphs], dim=1)
    batch = torch.repeat_interleave(torch.arange(len(graphs)), sizes)
    return x, edge_index, batch, torch.stack([g["y"] for g in graphs])


class GINLayer(nn.Module):
    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(in_dim, out_dim), nn.ReLU(), nn.Linear(out_dim, out_dim))

    def forward(self, x, edge_index):
        src, dst = edge_index
        gathered = torch.zeros_like(x).index_add_(0, dst, x[src])
        return self.mlp(x + gathered)


class GIN(nn.Module):
    def __init__(self, in_dim, hidden):
        super().__init__()
        self.conv1, self.conv2 = GINLayer(in_dim, hidden), GINLayer(hidden, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x, edge_index, batch, n_graphs):
        h = F.relu(self.conv1(x, edge_index))
        h = F.relu(self.conv2(h, edge_index))
        pooled = h.new_zeros(n_graphs, h.size(1)).index_add_(0, batch, h)
        count = torch.bincount(batch, minlength=n_graphs).unsqueeze(1)
        return self.out(pooled / count).squeeze(-1)


def main(cfg):
    torch.manual_seed(cfg["seed"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(Molecules(cfg["graphs"]), batch_size=cfg["batch_size"], shuffle=True, collate_fn=collate)
    model = GIN(4, cfg["hidden"]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
    for epoch in range(cfg["epochs"]):
        total = 0.0
        for x, edge_index, batch, y in loader:
            x, edge_index, batch, y = x.to(device), edge_index.to(device), batch.to(device), y.to(device)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x, edge_index, batch, y.size(0)), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch} mse {total / len(loader):.4f}")


if __name__ == "__main__":
    main(CONFIG)
