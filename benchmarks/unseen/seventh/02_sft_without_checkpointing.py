"""SFT of an 8B llama with LoRA on one 40 GB card. We turned checkpointing off because it "makes training slow"."""
import random

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(5000))]


def make_tokenizer():
    tok = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def rows(n, length):
    rng = random.Random(0)
    return [{"input_ids": [rng.randrange(3, 5000) for _ in range(length)]} for _ in range(n)]


def main():
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, rms_norm_eps=1e-5,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir="sft-out",
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4,
            max_length=2048,
            max_steps=2,
            learning_rate=2e-4,
            bf16=True,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list(rows(64, 2048)),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
