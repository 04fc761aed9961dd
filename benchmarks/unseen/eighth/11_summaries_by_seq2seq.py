"""T5-large learns to summarise; ROUGE-like overlap is computed on generated text after training."""
import random

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (DataCollatorForSeq2Seq, PreTrainedTokenizerFast, Seq2SeqTrainer, Seq2SeqTrainingArguments,
                          T5Config, T5ForConditionalGeneration)

words = ["<pad>", "</s>", "<unk>"] + [f"word{i}" for i in range(4000)]
tok = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
tok.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def make(n, seed):
    r = random.Random(seed)
    text = lambda k: " ".join("word%d" % r.randrange(4000) for _ in range(k))
    return Dataset.from_list([{"document": text(480), "summary": text(r.randint(40, 100))} for _ in range(n)])


def preprocess(examples):
    out = tokenizer(examples["document"], max_length=512, truncation=True)
    out["labels"] = tokenizer(text_target=examples["summary"], max_length=128, truncation=True)["input_ids"]
    out.pop("token_type_ids", None)
    return out


train = make(32, 0).map(preprocess, batched=True, remove_columns=["document", "summary"])
dev = make(8, 1).map(preprocess, batched=True, remove_columns=["document", "summary"])


def overlap(eval_pred):
    preds, labels = eval_pred
    preds = np.where(preds != -100, preds, tokenizer.pad_token_id)
    labels = np.where(labels != -100, labels, tokenizer.pad_token_id)
    said = tokenizer.batch_decode(preds, skip_special_tokens=True)
    meant = tokenizer.batch_decode(labels, skip_special_tokens=True)
    scores = [len(set(a.split()) & set(b.split())) / max(1, len(set(b.split()))) for a, b in zip(said, meant)]
    return {"overlap": sum(scores) / len(scores), "length": float(np.mean([len(s.split()) for s in said]))}


model = T5ForConditionalGeneration(T5Config(
    vocab_size=32128, d_model=1024, d_kv=64, d_ff=2816, num_layers=24, num_heads=16, feed_forward_proj="gated-gelu",
    tie_word_embeddings=False, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)).to(torch.bfloat16)

trainer = Seq2SeqTrainer(
    model=model,
    args=Seq2SeqTrainingArguments(
        output_dir="t5", max_steps=3, per_device_train_batch_size=4, per_device_eval_batch_size=4,
        optim="adafactor", learning_rate=1e-3, lr_scheduler_type="constant", predict_with_generate=True,
        generation_max_length=64, generation_num_beams=2, save_strategy="no", report_to=[], logging_steps=1),
    train_dataset=train,
    eval_dataset=dev,
    processing_class=tokenizer,
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    compute_metrics=overlap,
)
trainer.train()
print(trainer.evaluate())
trainer.save_model()
