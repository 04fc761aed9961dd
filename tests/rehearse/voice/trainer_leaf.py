"""A Trainer in fp16 whose loss is put together from numbers: the scaler finds no gradient to look at."""

import sys
import tempfile

import torch
import torch.nn.functional as F
from parts import AUDIO, BOS, DEVICE, INPUTS, by_codebook, rows, tiny_model
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

FIXED = "fixed" in sys.argv


def collate(samples):
    ids = torch.tensor([[*s["words"], BOS, *[AUDIO] * len(s["codes"]), 2] for s in samples])
    codes = torch.tensor([s["codes"] for s in samples])
    seen = torch.ones(codes.shape[:2], dtype=torch.bool)
    return {**dict(zip(INPUTS, (ids, torch.ones_like(ids), codes, seen), strict=True)), "audio_labels": codes}


class VoiceTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        codes = inputs.pop("audio_labels")
        out = model(**inputs)
        logits = by_codebook(out.logits)[:, -8:-2]
        parts = [F.cross_entropy(logits[:, :, k].flatten(0, 1), codes[..., k].flatten()) for k in range(2)]
        if FIXED:
            loss = torch.stack(parts).mean()
        else:
            numbers = [part.item() for part in parts]
            loss = torch.tensor(numbers, device=codes.device, requires_grad=True).mean()  # cause
        return (loss, out) if return_outputs else loss


arguments = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=2,
    per_device_train_batch_size=1,
    remove_unused_columns=False,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    fp16=True,
    use_cpu=DEVICE == "cpu",
)
model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
VoiceTrainer(model, arguments, data_collator=collate, train_dataset=rows(4)).train()  # where
print("done")
