"""Longformer finds answers in texts of all lengths, by HF's Trainer: global attention to the question, logits kept in evaluation."""
import json
import tempfile

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LongformerConfig, LongformerForQuestionAnswering, Trainer, TrainerCallback, TrainingArguments

HIDDEN, LAYERS, WINDOW, VOCAB, PAD, SEP = 768, 12, 256, 50265, 1, 2
LONGEST, QUESTION, BATCH, EVAL_BATCH, STEPS, ROWS = 3500, 24, 4, 6, 3, 40


class Texts(torch.utils.data.Dataset):
    def __init__(self, count, first):
        self.count, self.first = count, first

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        draw = torch.Generator().manual_seed(self.first + i)
        length = int(torch.randint(LONGEST // 4, LONGEST, (1,), generator=draw))
        ids = torch.randint(10, VOCAB, (length,), generator=draw)
        ids[QUESTION : QUESTION + 2] = SEP
        ids[-1] = SEP
        start = int(torch.randint(QUESTION + 2, length - 20, (1,), generator=draw))
        return {"input_ids": ids, "start": start, "end": start + 9}


def collate(rows):
    ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True, padding_value=PAD)
    everyone = torch.zeros_like(ids)
    everyone[:, :QUESTION] = 1
    return {
        "input_ids": ids,
        "attention_mask": (ids != PAD).long(),
        "global_attention_mask": everyone,
        "start_positions": torch.tensor([row["start"] for row in rows]),
        "end_positions": torch.tensor([row["end"] for row in rows]),
    }


class Tell(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print("step", state.global_step, torch.cuda.memory_allocated() >> 20, "MiB")


torch.manual_seed(31)
config = LongformerConfig(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HIDDEN // 64,
                          intermediate_size=4 * HIDDEN, attention_window=[WINDOW] * (LAYERS // 2) + [2 * WINDOW] * (LAYERS - LAYERS // 2),
                          max_position_embeddings=4098, pad_token_id=PAD, bos_token_id=0, eos_token_id=SEP, sep_token_id=SEP,
                          type_vocab_size=1)
model = LongformerForQuestionAnswering(config).to("cuda")
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=BATCH,
    per_device_eval_batch_size=EVAL_BATCH,
    gradient_accumulation_steps=2,
    max_steps=STEPS,
    learning_rate=3e-5,
    weight_decay=0.01,
    optim="adamw_torch",
    bf16=True,
    torch_empty_cache_steps=2,
    eval_accumulation_steps=1,
    label_names=["start_positions", "end_positions"],
    remove_unused_columns=False,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(model=model, args=args, train_dataset=Texts(ROWS, 0), eval_dataset=Texts(9, 10**6), data_collator=collate,
                  callbacks=[Tell()])
trainer.train()
print(trainer.evaluate())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
