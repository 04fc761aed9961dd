"""DeBERTa v2 for classification through HF's Trainer: bf16, accumulation, label smoothing, an evaluation."""
import json
import tempfile

import numpy as np
import torch
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification, Trainer, TrainingArguments

LAYERS, HIDDEN, LENGTH, BATCH = 12, 768, 384, 16


class Rows(torch.utils.data.Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(5, 1000, (LENGTH,), generator=g)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": i % 3}


def metrics(p):
    return {"accuracy": float((np.argmax(p.predictions, axis=-1) == p.label_ids).mean())}


config = DebertaV2Config(vocab_size=128100, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN,
                         num_hidden_layers=LAYERS, num_attention_heads=HIDDEN // 64, relative_attention=True,
                         position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True,
                         pos_att_type=["p2c", "c2p"], position_biased_input=False, num_labels=3)
model = DebertaV2ForSequenceClassification(config)
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=BATCH, per_device_eval_batch_size=2 * BATCH,
    gradient_accumulation_steps=2, max_steps=3, learning_rate=2e-5, bf16=True, label_smoothing_factor=0.1,
    eval_strategy="steps", eval_steps=2, save_strategy="no", report_to=[], logging_steps=1, dataloader_num_workers=0,
)
trainer = Trainer(model=model, args=args, train_dataset=Rows(200), eval_dataset=Rows(64), compute_metrics=metrics)
trainer.train()
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
