"""TRL's DPOTrainer, LoRA (the reference is the model without it), gradient checkpointing as TRL sets it."""
import json
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

LAYERS, HIDDEN, BATCH, WORDS = 12, 2048, 4, 300

vocabulary = {f"t{i}": i for i in range(997)} | {"<unk>": 997, "<eos>": 998, "<pad>": 999}
raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>")


def say(seed, n):
    return " ".join(f"t{(seed * 31 + k * 17) % 997}" for k in range(n))


rows = Dataset.from_list([{"prompt": say(i, 40), "chosen": " " + say(i + 1, WORDS - i % 50),
                           "rejected": " " + say(i + 2, WORDS // 2 + i % 70)} for i in range(32)])
config = LlamaConfig(vocab_size=32000, hidden_size=HIDDEN, intermediate_size=HIDDEN * 11 // 4, num_hidden_layers=LAYERS,
                     num_attention_heads=HIDDEN // 64, num_key_value_heads=8, eos_token_id=998, pad_token_id=999)
model = LlamaForCausalLM(config).to(dtype=torch.bfloat16)
args = DPOConfig(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=BATCH, max_steps=3, bf16=True, beta=0.1,
                 learning_rate=5e-6, report_to=[], save_strategy="no", logging_steps=1, max_length=512)
trainer = DPOTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer,
                     peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
trainer.train()
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
