"""GraphSAGE over a whole graph of random edges with torch-geometric, dropout, class weights."""
import json

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, SAGEConv

NODES, EDGES, FEATURES, HIDDEN, CLASSES = 60_000, 600_000, 256, 256, 40

torch.manual_seed(3)
data = Data(x=torch.randn(NODES, FEATURES), edge_index=torch.randint(0, NODES, (2, EDGES)),
            y=torch.randint(0, CLASSES, (NODES,)), train_mask=torch.arange(NODES) % 2 == 0).to("cuda")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = SAGEConv(FEATURES, HIDDEN)
        self.two = GATConv(HIDDEN, HIDDEN // 4, heads=4)
        self.three = SAGEConv(HIDDEN, CLASSES, aggr="max")

    def forward(self, x, edges):
        x = F.dropout(self.one(x, edges).relu(), 0.5, self.training)
        x = F.dropout(F.elu(self.two(x, edges)), 0.5, self.training)
        return self.three(x, edges)


model = Net().to("cuda")
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(3):
    model.train()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        right = (model(data.x, data.edge_index).argmax(1) == data.y)[~data.train_mask].float().mean()
    print(epoch, loss.item(), right.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
