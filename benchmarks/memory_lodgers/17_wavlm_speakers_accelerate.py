"""Who speaks: a WavLM large with an x-vector head and an angular loss, clips of three to eleven seconds, under Accelerate in bf16."""
import json
import random

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import WavLMConfig, WavLMForXVector

RATE, SPEAKERS, HIDDEN, LAYERS, HEADS = 16000, 1251, 1024, 24, 16
CLIPS, BATCH, HELD_BATCH, ACCUMULATE = 64, 8, 16, 2


class Clips(Dataset):
    def __init__(self, count, seed):
        draw = random.Random(seed)
        self.told = [(draw.randint(3 * RATE, 11 * RATE), draw.randrange(SPEAKERS)) for _ in range(count)]

    def __len__(self):
        return len(self.told)

    def __getitem__(self, i):
        length, speaker = self.told[i]
        pitch = 80 + 40 * (speaker % 7)
        t = torch.arange(length) / RATE
        wave = torch.sin(2 * torch.pi * pitch * t) + 0.1 * torch.randn(length)
        return (wave - wave.mean()) / wave.std(), speaker


def pad(rows):
    longest = max(len(wave) for wave, _ in rows)
    waves, mask = torch.zeros(len(rows), longest), torch.zeros(len(rows), longest, dtype=torch.long)
    for n, (wave, _) in enumerate(rows):
        waves[n, : len(wave)] = wave
        mask[n, : len(wave)] = 1
    return {"input_values": waves, "attention_mask": mask, "labels": torch.tensor([speaker for _, speaker in rows])}


set_seed(29)
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATE)
config = WavLMConfig(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=4 * HIDDEN,
                     feat_extract_norm="layer", do_stable_layer_norm=True, layerdrop=0.0, mask_time_prob=0.05,
                     use_weighted_layer_sum=True, num_labels=SPEAKERS)
model = WavLMForXVector(config)
model.freeze_feature_encoder()
head = [p for n, p in model.named_parameters() if p.requires_grad and not n.startswith("wavlm.")]
body = [p for n, p in model.named_parameters() if p.requires_grad and n.startswith("wavlm.")]
optimizer = torch.optim.AdamW([{"params": body, "lr": 2e-5}, {"params": head, "lr": 1e-3}], weight_decay=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[2e-5, 1e-3], total_steps=8)
loader = DataLoader(Clips(CLIPS, 0), batch_size=BATCH, shuffle=True, collate_fn=pad, drop_last=True)
held = DataLoader(Clips(HELD_BATCH, 1), batch_size=HELD_BATCH, collate_fn=pad)
model, optimizer, loader, held, schedule = accelerator.prepare(model, optimizer, loader, held, schedule)

model.train()
for step, batch in enumerate(loader):
    with accelerator.accumulate(model):
        out = model(**batch)
        accelerator.backward(out.loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.print(step, tuple(batch["input_values"].shape), out.loss.item())
    if step == 5:
        break

model.eval()
with torch.no_grad():
    for batch in held:
        vectors = torch.nn.functional.normalize(model(**batch).embeddings.float(), dim=-1)
        scores = accelerator.gather_for_metrics(vectors @ vectors.T)
        accelerator.print("mean score", scores.mean().item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
