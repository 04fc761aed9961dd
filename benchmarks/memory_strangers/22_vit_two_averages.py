"""A DINOv2 with a linear head, tuned with mixup, two averaged copies of the weights and evaluation by both."""

import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import Dinov2Config, Dinov2Model

BATCH, SIZE, CLASSES = 48, 336, 1000


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Dinov2Model(
            Dinov2Config(
                hidden_size=1024,
                num_hidden_layers=24,
                num_attention_heads=16,
                image_size=518,
                patch_size=14,
                drop_path_rate=0.1,
            )
        )
        self.head = nn.Linear(2 * 1024, CLASSES)

    def forward(self, pixels):
        tokens = self.body(pixels).last_hidden_state
        return self.head(torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], -1))


model = Classifier().cuda()
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
slow = AveragedModel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for step in range(3):
    pixels = torch.randn(BATCH, 3, SIZE, SIZE, device="cuda")
    labels = F.one_hot(torch.randint(0, CLASSES, (BATCH,), device="cuda"), CLASSES).float()
    other = torch.randperm(BATCH, device="cuda")
    pixels, labels = 0.7 * pixels + 0.3 * pixels[other], 0.7 * labels + 0.3 * labels[other]
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(pixels), labels, label_smoothing=0.1)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
    ema.update_parameters(model)
    slow.update_parameters(model)
with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
    for averaged in (ema, slow):
        averaged.eval()
        print(averaged(torch.randn(2 * BATCH, 3, SIZE, SIZE, device="cuda")).argmax(-1).sum().item())
print(
    json.dumps(
        {
            "max_memory_allocated": torch.cuda.max_memory_allocated(),
            "max_memory_reserved": torch.cuda.max_memory_reserved(),
        }
    )
)
