"""Stage 1 on raw text, stage 2 on instructions, the same weights.

python 03_two_trainers_one_model.py [let-go]
"""
import gc
import sys

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Ids(Dataset):
    def __init__(self, rows, seed):
        self.ids = torch.randint(0, 128256, (rows, 512), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return self.ids.shape[0]

    def __getitem__(self, index):
        return dict(input_ids=self.ids[index], labels=self.ids[index].clone())


def args(name, lr):
    return TrainingArguments(
        output_dir=f"runs/{name}",
        per_device_train_batch_size=2,
        max_steps=2,
        learning_rate=lr,
        optim="adamw_torch_fused",
        gradient_checkpointing=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )


cfg = LlamaConfig(vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=34, num_attention_heads=24,
                  num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, use_cache=False)
model = LlamaForCausalLM(cfg).to(torch.bfloat16)

stage1 = Trainer(model=model, args=args("stage1", 1e-5), train_dataset=Ids(16, 0))
stage1.train()

if "let-go" in sys.argv:
    del stage1
    gc.collect()

stage2 = Trainer(model=model, args=args("stage2", 5e-6), train_dataset=Ids(16, 1))
stage2.train()
stage2.save_model("runs/final")
