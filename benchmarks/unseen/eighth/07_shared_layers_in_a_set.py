# multi-task: every rank has its own head, everything else is shared and averaged
# run: torchrun --nproc-per-node 2 07_shared_layers_in_a_set.py [sorted]
import os, sys
import torch, torch.nn as nn, torch.distributed as dist

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

class MultiTask(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Linear(32, 48)
        self.body = nn.ModuleList([nn.Linear(48, 64), nn.Linear(64, 80), nn.Linear(80, 96)])
        self.norm = nn.LayerNorm(96)
        self.head = nn.Linear(96, classes)
    def forward(self, x):
        x = self.stem(x).relu()
        for layer in self.body:
            x = layer(x).relu()
        return self.head(self.norm(x))

torch.manual_seed(0)
classes = [5, 9][rank]
net = MultiTask(classes).cuda()
params = dict(net.named_parameters())
shared = set(params) - {"head.weight", "head.bias"}
if "sorted" in sys.argv:
    shared = sorted(shared)

opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
gen = torch.Generator().manual_seed(rank)
for step in range(4):
    x = torch.randn(16, 32, generator=gen).cuda()
    y = torch.randint(0, classes, (16,), generator=gen).cuda()
    loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    for name in shared:
        dist.all_reduce(params[name].grad)
        params[name].grad /= world
    opt.step()
    print(f"[{rank}] step {step} loss {loss.item():.3f}")
dist.destroy_process_group()
