"""TRL's SFTTrainer with Liger's kernels, LoRA and gradient checkpointing on a Mistral of 1.3 billion weights."""

import json
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = {f"w{i}": i for i in range(900)} | {"<unk>": 900, "<eos>": 901, "<pad>": 902}
inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=inner, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>"
)

config = MistralConfig(
    vocab_size=131072,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=20,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=128,
    sliding_window=None,
    eos_token_id=901,
    pad_token_id=902,
)
model = MistralForCausalLM(config).to(torch.bfloat16)
data = Dataset.from_list(
    [
        {
            "prompt": " ".join(f"w{(i + j) % 900}" for j in range(50 + 9 * i % 400)),
            "completion": " ".join(f"w{(i * j) % 900}" for j in range(100 + 31 * i % 1500)),
        }
        for i in range(64)
    ]
)
args = SFTConfig(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=8,
    max_length=2048,
    max_steps=3,
    bf16=True,
    use_liger_kernel=True,
    gradient_checkpointing=True,
    report_to=[],
    save_strategy="no",
    logging_steps=1,
    learning_rate=1e-4,
    optim="adamw_torch",
)
trainer = SFTTrainer(
    model=model,
    args=args,
    train_dataset=data,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
print(
    json.dumps(
        {
            "max_memory_allocated": torch.cuda.max_memory_allocated(),
            "max_memory_reserved": torch.cuda.max_memory_reserved(),
        }
    )
)
