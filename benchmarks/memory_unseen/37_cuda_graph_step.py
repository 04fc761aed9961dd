"""A whole training step captured in a CUDA graph and replayed, as in PyTorch's notes."""
import json

import torch
import torch.nn as nn

DIM, BATCH = 4096, 2048

model = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.Dropout(0.1), nn.ReLU(), nn.Linear(4 * DIM, DIM)).cuda()
loss_fn = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
static_input, static_target = torch.randn(BATCH, DIM, device="cuda"), torch.randn(BATCH, DIM, device="cuda")

side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        loss_fn(model(static_input), static_target).backward()
        optimizer.step()
torch.cuda.current_stream().wait_stream(side)

graph = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(graph):
    static_loss = loss_fn(model(static_input), static_target)
    static_loss.backward()
    optimizer.step()
for _ in range(5):
    static_input.copy_(torch.randn(BATCH, DIM, device="cuda"))
    static_target.copy_(torch.randn(BATCH, DIM, device="cuda"))
    graph.replay()
print(static_loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
