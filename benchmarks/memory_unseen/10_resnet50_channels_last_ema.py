"""ResNet-50 on synthetic ImageNet: channels_last, fp16 AMP, SGD with momentum, EMA of the weights."""
import copy
import json

import torch
import torch.nn as nn
import torchvision

BATCH, SIZE = 128, 224

torch.manual_seed(0)
torch.backends.cudnn.benchmark = False
device = "cuda"
model = torchvision.models.resnet50(weights=None).to(device, memory_format=torch.channels_last)
ema = copy.deepcopy(model).eval().requires_grad_(False)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=5e-5, nesterov=True)
scaler = torch.amp.GradScaler()


def update_ema(decay=0.999):
    with torch.no_grad():
        for e, p in zip(ema.state_dict().values(), model.state_dict().values()):
            if e.dtype.is_floating_point:
                e.mul_(decay).add_(p, alpha=1 - decay)
            else:
                e.copy_(p)


for it in range(4):
    images = torch.randn(BATCH, 3, SIZE, SIZE).to(device, memory_format=torch.channels_last, non_blocking=True)
    target = torch.randint(0, 1000, (BATCH,), device=device)
    with torch.amp.autocast("cuda", dtype=torch.float16):
        loss = criterion(model(images), target)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    update_ema()
    print(it, loss.item())

with torch.no_grad(), torch.amp.autocast("cuda", dtype=torch.float16):
    print(ema(images).argmax(1)[:4].tolist())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
