"""Activations of each block go to pinned host memory on a side stream and come back in the backward pass."""

import json

import torch
import torch.nn as nn
import torch.nn.functional as F

DIM, HEADS, LAYERS, LENGTH, BATCH = 1536, 12, 24, 2048, 4
side = torch.cuda.Stream()


class Offload(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self, smallest=2**22):
        def pack(tensor):
            if tensor.numel() < smallest or not tensor.is_cuda or isinstance(tensor, nn.Parameter):
                return tensor
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                host.copy_(tensor, non_blocking=True)
            tensor.record_stream(side)
            return tensor.device, host

        def unpack(kept):
            if isinstance(kept, torch.Tensor):
                return kept
            device, host = kept
            torch.cuda.current_stream().wait_stream(side)
            return host.to(device, non_blocking=True)

        super().__init__(pack, unpack)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 8 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, DIM))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50304, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, 50304, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            with Offload():
                x = block(x)
        return self.head(self.norm(x))


net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
for step in range(3):
    ids = torch.randint(0, 50304, (BATCH, LENGTH + 1), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        logits = net(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item())
torch.cuda.synchronize()
print(
    json.dumps(
        {
            "max_memory_allocated": torch.cuda.max_memory_allocated(),
            "max_memory_reserved": torch.cuda.max_memory_reserved(),
        }
    )
)
