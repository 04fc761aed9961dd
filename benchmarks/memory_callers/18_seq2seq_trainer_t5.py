"""T5 v1.1 through Seq2SeqTrainer: label smoothing, Adafactor, bf16, rows of all lengths, an evaluation that generates."""
import json
import tempfile

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

WIDTH, FF, LAYERS, HEADS, VOCAB = 1024, 2816, 24, 16, 32128
BATCH, EVAL_BATCH, SOURCE, TARGET, STEPS, ROWS = 8, 16, 640, 160, 3, 64

torch.manual_seed(11)
draw = torch.Generator().manual_seed(11)
config = T5Config(vocab_size=VOCAB, d_model=WIDTH, d_kv=64, d_ff=FF, num_layers=LAYERS, num_decoder_layers=LAYERS,
                  num_heads=HEADS, feed_forward_proj="gated-gelu", tie_word_embeddings=False, dropout_rate=0.1,
                  decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
with torch.device("cuda"):
    model = T5ForConditionalGeneration(config)
model.generation_config.max_length = TARGET // 4


def words(low, high):
    n = int(torch.randint(low, high, (1,), generator=draw))
    return torch.randint(2, VOCAB, (n,), generator=draw).tolist() + [1]


class Pairs(torch.utils.data.Dataset):
    def __init__(self, count):
        self.rows = [{"input_ids": words(SOURCE // 4, SOURCE), "labels": words(TARGET // 8, TARGET)} for _ in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    ids = pad_sequence([torch.tensor(r["input_ids"]) for r in rows], batch_first=True, padding_value=0)
    labels = pad_sequence([torch.tensor(r["labels"]) for r in rows], batch_first=True, padding_value=-100)
    shifted = labels.new_zeros(labels.shape)
    shifted[:, 1:] = labels[:, :-1].clamp(min=0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels, "decoder_input_ids": shifted}


args = Seq2SeqTrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=BATCH,
    per_device_eval_batch_size=EVAL_BATCH,
    max_steps=STEPS,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    optim="adafactor",
    label_smoothing_factor=0.1,
    predict_with_generate=True,
    bf16=True,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
trainer = Seq2SeqTrainer(model=model, args=args, train_dataset=Pairs(ROWS), eval_dataset=Pairs(EVAL_BATCH), data_collator=collate)
trainer.train()
print(trainer.evaluate())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
