"""HF's Trainer on a Llama of 0.9B with Liger's kernels: bitsandbytes' Lion, lengths grouped, evaluations with larger batches."""
import json
import random
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

VOCAB, HIDDEN, LAYERS, HEADS, KV, WIDE = 50432, 1536, 24, 16, 8, 5632
ROWS, HELD, SHORT, LONG, BATCH, EVAL_BATCH, STEPS = 120, 30, 200, 1400, 4, 10, 4

set_seed(17)


class Conversations(torch.utils.data.Dataset):
    """A prompt that is not learned, then an answer; no padding yet."""

    def __init__(self, count, seed):
        draw = random.Random(seed)
        self.rows = []
        for _ in range(count):
            length = draw.randint(SHORT, LONG)
            ids = [draw.randrange(3, VOCAB) for _ in range(length)]
            asked = length // 3
            self.rows.append({"input_ids": ids, "labels": [-100] * asked + ids[asked:], "length": length})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows, multiple=8):
    longest = max(len(row["input_ids"]) for row in rows)
    longest = -(-longest // multiple) * multiple
    out = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in rows:
        empty = longest - len(row["input_ids"])
        out["input_ids"].append(row["input_ids"] + [0] * empty)
        out["attention_mask"].append([1] * len(row["input_ids"]) + [0] * empty)
        out["labels"].append(row["labels"] + [-100] * empty)
    return {key: torch.tensor(value) for key, value in out.items()}


model = LlamaForCausalLM(
    LlamaConfig(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV,
                intermediate_size=WIDE, max_position_embeddings=2048, tie_word_embeddings=False, pad_token_id=0, use_cache=False)
)
print(f"{model.num_parameters():,} parameters")
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=BATCH,
    per_device_eval_batch_size=EVAL_BATCH,
    gradient_accumulation_steps=2,
    max_steps=STEPS,
    learning_rate=2e-5,
    lr_scheduler_type="cosine",
    warmup_steps=1,
    weight_decay=0.1,
    optim="lion_32bit",
    bf16=True,
    use_liger_kernel=True,
    label_smoothing_factor=0.1,
    train_sampling_strategy="group_by_length",
    eval_strategy="steps",
    eval_steps=2,
    prediction_loss_only=True,
    save_strategy="no",
    logging_steps=1,
    report_to="none",
    dataloader_num_workers=0,
    remove_unused_columns=True,
)
trainer = Trainer(model=model, args=args, train_dataset=Conversations(ROWS, 1), eval_dataset=Conversations(HELD, 2), data_collator=collate)
trainer.train()
print(trainer.evaluate())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
