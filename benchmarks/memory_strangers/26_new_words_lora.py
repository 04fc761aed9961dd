"""New words: embeddings are resized and trained whole beside LoRA, by Trainer with rows padded to the longest."""

import json
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    ArceeConfig,
    ArceeForCausalLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

words = {f"w{i}": i for i in range(32000)} | {"<unk>": 32000, "<pad>": 32001}
inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>")
model = ArceeForCausalLM(
    ArceeConfig(
        vocab_size=32002,
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=16,
        num_attention_heads=20,
        num_key_value_heads=4,
        head_dim=128,
    )
).to(torch.bfloat16)
tokenizer.add_tokens([f"<new{i}>" for i in range(3000)])
model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)
model = get_peft_model(
    model,
    LoraConfig(
        r=16,
        lora_dropout=0.1,
        target_modules=["q_proj", "v_proj", "up_proj"],
        modules_to_save=["embed_tokens", "lm_head"],
        task_type="CAUSAL_LM",
    ),
)
rows = [
    tokenizer(
        " ".join(f"w{i * j % 32000}" if j % 5 else f"<new{j % 3000}>" for j in range(99 + 61 * i % 1400))
    )
    for i in range(80)
]
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=8,
    max_steps=4,
    bf16=True,
    gradient_accumulation_steps=2,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    learning_rate=1e-4,
    optim="adamw_torch_fused",
    remove_unused_columns=False,
)
Trainer(
    model=model,
    args=args,
    train_dataset=rows,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=8),
).train()
print(
    json.dumps(
        {
            "max_memory_allocated": torch.cuda.max_memory_allocated(),
            "max_memory_reserved": torch.cuda.max_memory_reserved(),
        }
    )
)
