"""In the dict that a Trainer is given lies an object; a helper of the loss takes the labels out of it."""

import sys
import tempfile

import torch
from parts import AUDIO, BOS, DEVICE, INPUTS, by_codebook, rows, tiny_model
from torch import nn
from transformers import Trainer, TrainingArguments


class Labels:
    """What the loss wants of a batch."""

    def __init__(self, codes):
        self.codes = codes

    if "fixed" in sys.argv:

        def to(self, device, non_blocking=False):
            return Labels(self.codes.to(device))


def collate(samples):
    ids = torch.tensor([[*s["words"], BOS, *[AUDIO] * len(s["codes"]), 2] for s in samples])
    codes = torch.tensor([s["codes"] for s in samples])
    seen = torch.ones(codes.shape[:2], dtype=torch.bool)
    wanted = Labels(codes.clone())  # cause
    return {**dict(zip(INPUTS, (ids, torch.ones_like(ids), codes, seen), strict=True)), "wanted": wanted}


class VoiceTrainer(Trainer):
    entropy = nn.CrossEntropyLoss()

    def audio_loss(self, logits, wanted):
        pairs = [(logits[:, :, k].transpose(1, 2), k) for k in range(2)]
        books = [self.entropy(told, wanted.codes[..., k]) for told, k in pairs]  # where
        return torch.stack(books).mean()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        wanted = inputs.pop("wanted")
        out = model(**inputs)
        loss = self.audio_loss(by_codebook(out.logits)[:, -8:-2], wanted)
        return (loss, out) if return_outputs else loss


arguments = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=2,
    per_device_train_batch_size=2,
    remove_unused_columns=False,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    use_cpu=DEVICE == "cpu",
)
VoiceTrainer(tiny_model(), arguments, data_collator=collate, train_dataset=rows(4)).train()
print("done")
