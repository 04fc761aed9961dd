import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class GraphConvolution(nn.Module):
    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.linear = nn.Linear(in_dim, out_dim)

    def forward(self, adj, h):
        return adj @ self.linear(h)


class GCN(nn.Module):
    def __init__(self, in_dim, hidden, classes, n_layers, dropout):
        super().__init__()
        self.dropout = dropout
        self.layers = []
        for i in range(n_layers):
            self.layers.append(GraphConvolution(in_dim if i == 0 else hidden, hidden))
        self.fc1 = nn.Linear(hidden, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, adj, h):
        for layer in self.layers:
            h = F.relu(layer(adj, h))
            h = F.dropout(h, self.dropout, training=self.training)
        pooled = h.mean(dim=1)
        return self.fc2(F.relu(self.fc1(pooled)))


def normalise(adj):
    adj = adj + torch.eye(adj.size(-1))
    d = adj.sum(-1).rsqrt()
    return d[:, :, None] * adj * d[:, None, :]


def make_graphs(n, nodes, features):
    labels = torch.randint(0, 2, (n,))
    prob = torch.where(labels == 1, 0.6, 0.2)[:, None, None]
    upper = torch.triu((torch.rand(n, nodes, nodes) < prob).float(), diagonal=1)
    adj = upper + upper.transpose(1, 2)
    h = torch.randn(n, nodes, features) * 0.1 + adj.sum(-1, keepdim=True) / nodes
    return normalise(adj), h, labels


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--n-agg-layer", type=int, default=2)
    p.add_argument("--agg-hidden", type=int, default=32)
    p.add_argument("--dropout", type=float, default=0.1)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--steps", type=int, default=8)
    args = p.parse_args()

    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = GCN(6, args.agg_hidden, 2, args.n_agg_layer, args.dropout).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    model.train()
    for step in range(args.steps):
        adj, h, y = (t.to(device) for t in make_graphs(args.batch, 12, 6))
        optimizer.zero_grad()
        out = model(adj, h)
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        acc = (out.argmax(1) == y).float().mean().item()
        print(f"step {step} loss {loss.item():.4f} acc {acc:.2f}")
