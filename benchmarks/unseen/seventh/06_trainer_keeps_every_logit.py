"""Token accuracy through compute_metrics. argv: nothing, or `argmax`."""
import sys

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

LENGTH, VOCAB = 512, 128256


class Rows(Dataset):
    def __init__(self, n, seed):
        self.ids = torch.randint(0, VOCAB, (n, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def accuracy(prediction):
    guess, labels = prediction.predictions, prediction.label_ids
    if guess.ndim == 3:
        guess = guess.argmax(-1)
    return {"accuracy": float(np.mean(guess[:, :-1] == labels[:, 1:]))}


def best_token(logits, labels):
    return logits.argmax(dim=-1)


config = LlamaConfig(vocab_size=VOCAB, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
                     num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, use_cache=False, dtype=torch.bfloat16)
model = get_peft_model(LlamaForCausalLM(config).bfloat16(), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
model.enable_input_require_grads()

trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out",
        max_steps=2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        learning_rate=1e-4,
        save_strategy="no",
        report_to=[],
    ),
    train_dataset=Rows(16, 0),
    eval_dataset=Rows(96, 1),
    compute_metrics=accuracy,
    preprocess_logits_for_metrics=best_token if "argmax" in sys.argv[1:] else None,
)
trainer.train()
result = trainer.evaluate()
print(result)
