import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class GraphEncoder(nn.Module):
    def __init__(self, feat, dim):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(feat, 64), nn.Linear(64, dim)

    def forward(self, x, adj):
        return self.lin2(adj @ F.relu(self.lin1(adj @ x)))


class TextEncoder(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embed = nn.EmbeddingBag(vocab, 64)
        self.proj = nn.Linear(64, dim)

    def forward(self, tokens):
        return self.proj(F.relu(self.embed(tokens)))


class CLIP(nn.Module):
    def __init__(self, feat=20, vocab=50, dim=32):
        super().__init__()
        self.gnn = GraphEncoder(feat, dim)
        self.text = TextEncoder(vocab, dim)

    def forward(self, x, adj, tokens):
        return F.normalize(self.gnn(x, adj), dim=-1), F.normalize(self.text(tokens), dim=-1)


def cal_cl_loss(model, s_features, t_features, labels):
    logit_scale = nn.Parameter(torch.ones([], device=labels.device) * np.log(1 / 0.07)).exp()
    logits = logit_scale * s_features @ t_features.t()
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = CLIP().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    adj = torch.rand(16, 16, device=device).softmax(-1)
    x = torch.randn(16, 20, device=device)
    tokens = torch.randint(0, 50, (16, 8), device=device)
    labels = torch.arange(16, device=device)
    for epoch in range(10):
        s, t = model(x, adj, tokens)
        loss = cal_cl_loss(model, s, t, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
