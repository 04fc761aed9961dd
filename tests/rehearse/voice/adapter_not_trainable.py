"""An adapter is loaded to be trained on, but as one for inference: all of it is frozen."""

import sys
import tempfile

import torch
import torch.nn.functional as F
from parts import AUDIO, BOS, DEVICE, by_codebook, rows, tiny_model
from peft import LoraConfig, PeftModel, get_peft_model

saved = tempfile.mkdtemp()
get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).save_pretrained(saved)
base = tiny_model()
base.enable_input_require_grads()
if "fixed" in sys.argv:
    model = PeftModel.from_pretrained(base, saved, is_trainable=True).to(DEVICE)
else:
    model = PeftModel.from_pretrained(base, saved).to(DEVICE)  # cause
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
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)  # where
    scaler.update()
    optimizer.zero_grad()
print("done")
