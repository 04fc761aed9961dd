"""Saves model and AdamW's state, then resumes in place: the file is loaded to the GPU beside what is there."""
import torch
from torch import nn

net = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).cuda()
opt = torch.optim.AdamW(net.parameters(), lr=1e-4)


def step():
    net(torch.randn(8, 2048, device="cuda")).pow(2).mean().backward()
    opt.step()
    opt.zero_grad(set_to_none=True)


step()
step()
torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, "/tmp/foreign-10.pt")
spare = torch.cuda.mem_get_info()[1]
torch.cuda.set_per_process_memory_fraction(340 * 2**20 / spare)  # what training needs, and a little
step()
kept = torch.load("/tmp/foreign-10.pt", map_location="cuda")
net.load_state_dict(kept["net"])
opt.load_state_dict(kept["opt"])
step()
print("resumed")
