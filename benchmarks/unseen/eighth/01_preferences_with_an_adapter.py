"""DPO on a 3B llama, LoRA on every projection, the reference is the same model with its adapter off."""
import random

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

VOCAB = ["<pad>", "<eos>", "<unk>", *(f"t{i}" for i in range(8000))]
inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(VOCAB)}, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def say(rng, n):
    return " ".join(f"t{rng.randrange(8000)}" for _ in range(n))


rng = random.Random(3)
pairs = Dataset.from_list(
    [{"prompt": say(rng, 256), "chosen": " " + say(rng, 500), "rejected": " " + say(rng, 500)} for _ in range(24)]
)

config = LlamaConfig(
    vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=8192,
    pad_token_id=0, eos_token_id=1, bos_token_id=None,
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

trainer = DPOTrainer(
    model=model,
    args=DPOConfig(
        output_dir="dpo",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_length=1024,
        beta=0.1,
        learning_rate=5e-6,
        max_steps=2,
        bf16=True,
        gradient_checkpointing=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=pairs,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model("dpo/final")
