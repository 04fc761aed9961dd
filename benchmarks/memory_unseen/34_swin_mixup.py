"""Swin-T from torchvision with mixup, stochastic depth and bf16 autocast; validation without gradients."""
import json

import torch
import torch.nn.functional as F
import torchvision

BATCH, SIZE = 64, 224

model = torchvision.models.swin_t(weights=None, num_classes=200).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
for step in range(4):
    model.train()
    x = torch.randn(BATCH, 3, SIZE, SIZE, device="cuda")
    y = F.one_hot(torch.randint(0, 200, (BATCH,), device="cuda"), 200).float()
    order, lam = torch.randperm(BATCH, device="cuda"), 0.7
    x, y = lam * x + (1 - lam) * x[order], lam * y + (1 - lam) * y[order]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    if step == 1:
        model.eval()
        with torch.no_grad():
            print("val", model(torch.randn(2 * BATCH, 3, SIZE, SIZE, device="cuda")).softmax(-1).max().item())
        torch.cuda.empty_cache()
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
