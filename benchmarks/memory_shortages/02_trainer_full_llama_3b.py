"""Every weight of a 3B trained by the Trainer, in bf16, on 12 rows of 4,096 tokens."""

import json
import sys

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(3)
config = LlamaConfig(
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=28,
    num_attention_heads=24,
    num_key_value_heads=8,
    vocab_size=128256,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
    pad_token_id=0,
)


class Tokens(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(
            5, config.vocab_size, (4096,), generator=torch.Generator().manual_seed(index)
        )
        return {"input_ids": tokens, "labels": tokens}


torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = LlamaForCausalLM(config)
torch.set_default_dtype(torch.float32)
arguments = TrainingArguments(
    output_dir="out",
    max_steps=3,
    per_device_train_batch_size=3 if "--quarter" in sys.argv else 12,
    gradient_accumulation_steps=4 if "--quarter" in sys.argv else 1,
    gradient_checkpointing="--checkpointing" in sys.argv,
    learning_rate=1e-5,
    bf16=True,
    save_strategy="no",
    report_to=[],
    logging_steps=1,
)
Trainer(model, arguments, train_dataset=Tokens()).train()
peaks = ("max_memory_allocated", "max_memory_reserved")
print(json.dumps({name: getattr(torch.cuda, name)() for name in peaks}))
