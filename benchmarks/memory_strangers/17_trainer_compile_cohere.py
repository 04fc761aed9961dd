"""transformers' Trainer with torch_compile on a small Cohere2 in bf16, all weights tuned."""

import json
import tempfile

import torch
from transformers import Cohere2Config, Cohere2ForCausalLM, Trainer, TrainingArguments

LAYERS, HIDDEN, LENGTH, BATCH = 16, 1536, 1024, 8


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        ids = torch.randint(0, 30000, (LENGTH,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids.clone()}


config = Cohere2Config(
    vocab_size=64000,
    hidden_size=HIDDEN,
    intermediate_size=4 * HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=128,
    sliding_window=512,
)
model = Cohere2ForCausalLM(config)
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=BATCH,
    max_steps=3,
    bf16=True,
    torch_compile=True,
    optim="adamw_torch_fused",
    learning_rate=1e-5,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    max_grad_norm=1.0,
)
Trainer(model=model, args=args, train_dataset=Rows()).train()
print(
    json.dumps(
        {
            "max_memory_allocated": torch.cuda.max_memory_allocated(),
            "max_memory_reserved": torch.cuda.max_memory_reserved(),
        }
    )
)
