"""Trains until the loss has not improved for a while, scales the step by the norm, looks up what was guessed."""
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(50_000, 1024), nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 50_000)).cuda()
names = [f"word {n}" for n in range(50_000)]
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
best, waited = float("inf"), 0
for step in range(4):
    ids = torch.randint(0, 50_000, (8, 128), device="cuda")
    logits = net(ids)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    opt.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    if torch.isnan(norm) or norm > 1e4:
        print("skipped", step)
        continue
    opt.step()
    if loss < best:
        best, waited = loss.detach(), 0
    else:
        waited += 1
    if waited > 2:
        break
    print(step, names[logits[0, 0].argmax()], f"{loss:.3f}")
print("held", torch.cuda.max_memory_allocated() // 2**20)
