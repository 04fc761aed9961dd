"""What is trained is picked by a name that this model does not have: nothing is left to train."""

import sys

import torch
import torch.nn.functional as F
from parts import AUDIO, BOS, DEVICE, by_codebook, rows, tiny_model
from peft import LoraConfig, get_peft_model

WANTED = "audio_lm_head" if "fixed" in sys.argv else "audio_decoder_proj"
model = tiny_model()
model.enable_input_require_grads()
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "audio_lm_head"])).to(DEVICE)
for name, parameter in model.named_parameters():
    parameter.requires_grad = "lora_" in name and WANTED in name  # cause
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(DEVICE)
for row in rows(2):
    ids = torch.tensor([[*row["words"], BOS, *[AUDIO] * len(row["codes"]), 2]], device=DEVICE)
    codes = torch.tensor([row["codes"]], device=DEVICE)
    seen = torch.ones(codes.shape[:2], dtype=torch.bool, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.float16):
        out = model(input_ids=ids, audio_input_ids=codes, audio_input_ids_mask=seen)
        logits = by_codebook(out.logits)[:, -8:-2]
        loss = F.cross_entropy(logits.transpose(1, 3), codes.transpose(1, 2))
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # where
    scaler.update()
    optimizer.zero_grad()
print("done")
