"""Trainer with bitsandbytes' paged 8-bit AdamW, evaluation and checkpointing, on a Nemotron in bf16."""

import json
import tempfile

import torch
from transformers import NemotronConfig, NemotronForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(0)
LENGTH = 2048


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        ids = torch.randint(0, 50000, (LENGTH,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids.clone()}


config = NemotronConfig(
    vocab_size=131072,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=18,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=4096,
)
model = NemotronForCausalLM(config).to(torch.bfloat16)
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=4,
    per_device_eval_batch_size=2,
    max_steps=3,
    bf16=True,
    optim="paged_adamw_8bit",
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": True},
    eval_strategy="steps",
    eval_steps=2,
    prediction_loss_only=False,
    eval_accumulation_steps=1,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    learning_rate=1e-5,
)
Trainer(model=model, args=args, train_dataset=Rows(32), eval_dataset=Rows(4)).train()
print(
    json.dumps(
        {
            "max_memory_allocated": torch.cuda.max_memory_allocated(),
            "max_memory_reserved": torch.cuda.max_memory_reserved(),
        }
    )
)
