"""An accelerate script, started by `accelerate launch` with a config file that asks for FSDP2."""
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))


acc = Accelerator(gradient_accumulation_steps=2)
net = nn.Sequential(*(Block() for _ in range(3)))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
data = DataLoader(TensorDataset(torch.randn(64, 256)), batch_size=4)
net, opt, data = acc.prepare(net, opt, data)
for (x,) in data:
    with acc.accumulate(net):
        loss = net(x).pow(2).mean()
        acc.backward(loss)
        acc.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
seen = acc.gather_for_metrics(loss.detach().repeat(2))
acc.print(acc.num_processes, seen.shape, type(net).__name__)
acc.save_state("/tmp/foreign-24")
acc.end_training()
