#!/usr/bin/env python3
"""accelerate: train a bit, then let every process answer its own questions and gather the answers.

    accelerate launch --multi_gpu --num_processes 2 04_answers_gathered.py [pad]
"""
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

PAD = 0


def questions():
    g = torch.Generator().manual_seed(11)
    lengths = [5, 9, 6, 7, 12, 14, 8, 10, 4, 5, 17, 11, 6, 9, 13, 7]
    return [torch.randint(3, 500, (n,), generator=g) for n in lengths]


def left_padded(rows):
    ids = pad_sequence([r.flip(0) for r in rows], batch_first=True, padding_value=PAD).flip(1)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(5)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=500, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                         num_attention_heads=4, pad_token_id=PAD, bos_token_id=1, eos_token_id=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 1, 4)
    train = DataLoader(questions(), batch_size=2, shuffle=True, collate_fn=left_padded)
    test = DataLoader(questions(), batch_size=2, collate_fn=left_padded)
    model, optimizer, schedule, train, test = accelerator.prepare(model, optimizer, schedule, train, test)

    model.train()
    for batch in train:
        with accelerator.accumulate(model):
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            loss = model(**batch, labels=labels).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    model.eval()
    answers = []
    for batch in test:
        with torch.no_grad():
            out = accelerator.unwrap_model(model).generate(**batch, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        if "pad" in sys.argv:
            out = accelerator.pad_across_processes(out, dim=1, pad_index=PAD)
        answers += accelerator.gather_for_metrics(out).tolist()
    accelerator.print(len(answers), "answers")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
