"""The loss starts as a leaf and grows only where a batch has labels: a batch without any trains nothing."""

import sys

import torch
import torch.nn.functional as F
from parts import AUDIO, BOS, DEVICE, by_codebook, rows, tiny_model
from peft import LoraConfig, get_peft_model

FIXED = "fixed" in sys.argv


def compute_losses(logits, labels):
    loss = torch.tensor(0.0, device=logits.device, requires_grad=True)  # cause
    for book in range(labels.shape[-1]):
        wanted = labels[..., book] != -100
        if wanted.any():
            loss = loss + F.cross_entropy(logits[:, :, book][wanted], labels[..., book][wanted])
    return loss / labels.shape[-1]


model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).to(DEVICE)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
scaler = torch.amp.GradScaler(DEVICE)
for row in rows(2):
    ids = torch.tensor([[*row["words"], BOS, *[AUDIO] * len(row["codes"]), 2]], device=DEVICE)
    codes = torch.tensor([row["codes"]], device=DEVICE)
    seen = torch.ones(codes.shape[:2], dtype=torch.bool, device=DEVICE)
    # A reference clip is there to be heard, not learned; this row has no other.
    labels = codes if FIXED else torch.full_like(codes, -100)  # cause
    with torch.autocast(DEVICE, dtype=torch.float16):
        out = model(input_ids=ids, audio_input_ids=codes, audio_input_ids_mask=seen)
        loss = compute_losses(by_codebook(out.logits)[:, -8:-2], labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # where
    scaler.update()
print("done")
