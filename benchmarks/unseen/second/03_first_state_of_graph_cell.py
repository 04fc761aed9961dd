import torch
import torch.nn as nn


class DConv(nn.Module):
    def __init__(self, in_channels, out_channels, K):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(K, in_channels, out_channels))
        self.bias = nn.Parameter(torch.zeros(out_channels))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, X, adj):
        out = X @ self.weight[0]
        for k in range(1, self.weight.size(0)):
            X = adj @ X
            out = out + X @ self.weight[k]
        return out + self.bias


class DCRNN(nn.Module):
    def __init__(self, in_channels, out_channels, K=2):
        super().__init__()
        self.out_channels = out_channels
        self.update = DConv(in_channels + out_channels, out_channels, K)
        self.reset = DConv(in_channels + out_channels, out_channels, K)
        self.candidate = DConv(in_channels + out_channels, out_channels, K)

    def _set_hidden_state(self, X, H):
        if H is None:
            H = torch.zeros(X.shape[0], self.out_channels)
        return H

    def forward(self, X, adj, H=None):
        H = self._set_hidden_state(X, H)
        Z = torch.sigmoid(self.update(torch.cat([X, H], dim=1), adj))
        R = torch.sigmoid(self.reset(torch.cat([X, H], dim=1), adj))
        H_tilde = torch.tanh(self.candidate(torch.cat([X, H * R], dim=1), adj))
        return Z * H + (1 - Z) * H_tilde


class RecurrentGCN(nn.Module):
    def __init__(self, node_features):
        super().__init__()
        self.recurrent = DCRNN(node_features, 16)
        self.linear = nn.Linear(16, 1)

    def forward(self, x, adj):
        return self.linear(torch.relu(self.recurrent(x, adj)))


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
adj = torch.rand(20, 20)
adj = (adj / adj.sum(1, keepdim=True)).to(device)
snapshots = [(torch.randn(20, 4).to(device), torch.randn(20).to(device)) for _ in range(6)]
model = RecurrentGCN(4).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(2):
    cost = 0
    for x, y in snapshots:
        cost = cost + torch.mean((model(x, adj).squeeze(1) - y) ** 2)
    cost = cost / len(snapshots)
    cost.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(epoch, cost.item())
