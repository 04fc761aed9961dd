"""Goes on from a checkpoint whose dict stays bound while it trains (host: it is read into the host's memory)."""
import gc
import sys

import torch
from torch import nn


def build():
    net = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(12))).cuda()
    return net, torch.optim.AdamW(net.parameters(), lr=1e-5, fused=True)


def step(net, opt):
    loss = net(torch.randn(64, 8192, device="cuda")).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)


def first_run():
    net, opt = build()
    for _ in range(2):
        step(net, opt)
    torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "step": 2}, "last.pt")


first_run()
gc.collect()
torch.cuda.empty_cache()
net, opt = build()
checkpoint = torch.load("last.pt", map_location="cpu" if "host" in sys.argv[1:] else "cuda")
net.load_state_dict(checkpoint["net"])
opt.load_state_dict(checkpoint["opt"])
for _ in range(checkpoint["step"], 4):
    step(net, opt)
