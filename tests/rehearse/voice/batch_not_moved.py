"""The collator gives an object of its own, which Trainer hands over as it is: its labels stay on the CPU."""

import sys
import tempfile
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from parts import AUDIO, BOS, DEVICE, INPUTS, by_codebook, rows, tiny_model
from transformers import Trainer, TrainingArguments

FIXED = "fixed" in sys.argv


@dataclass
class VoiceBatch:
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    audio_input_ids: torch.Tensor
    audio_input_ids_mask: torch.Tensor
    audio_labels: torch.Tensor

    def __len__(self):
        return len(fields(self))

    def __contains__(self, name):
        return name in {field.name for field in fields(self)}

    def __getitem__(self, name):
        return getattr(self, name)


class Collator:
    def __call__(self, samples):
        ids = torch.tensor([[*s["words"], BOS, *[AUDIO] * len(s["codes"]), 2] for s in samples])
        codes = torch.tensor([s["codes"] for s in samples])
        seen = torch.ones(codes.shape[:2], dtype=torch.bool)
        parts = dict(zip(INPUTS, (ids, torch.ones_like(ids), codes, seen), strict=True))
        if FIXED:
            return {**parts, "audio_labels": codes.clone()}
        return VoiceBatch(**parts, audio_labels=codes.clone())  # cause


class VoiceTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        device = next(model.parameters()).device
        out = model(**{name: inputs[name].to(device) for name in INPUTS})
        logits = by_codebook(out.logits)
        scores = logits[:, -8:-2].transpose(1, 3)
        labels = inputs["audio_labels"].transpose(1, 2)
        loss = F.cross_entropy(scores, labels)  # where
        return (loss, out) if return_outputs else loss


arguments = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=2,
    per_device_train_batch_size=1,
    remove_unused_columns=False,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    use_cpu=DEVICE == "cpu",
)
VoiceTrainer(tiny_model(), arguments, data_collator=Collator(), train_dataset=rows(4)).train()
print("done")
