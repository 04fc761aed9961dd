"""TRL's SFTTrainer with LoRA on a Qwen2 in random weights, packed rows."""
import json
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer

LAYERS, HIDDEN, LENGTH, ROWS = 16, 1536, 1024, 256

words = {f"w{i}": i for i in range(500)} | {"<unk>": 500, "<eos>": 501, "<pad>": 502}
inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>")

config = Qwen2Config(vocab_size=151936, hidden_size=HIDDEN, intermediate_size=6 * HIDDEN, num_hidden_layers=LAYERS,
                     num_attention_heads=HIDDEN // 128, num_key_value_heads=2, eos_token_id=501, pad_token_id=502)
model = Qwen2ForCausalLM(config).to(torch.bfloat16)
data = Dataset.from_dict({"text": [" ".join(f"w{(i * 7 + j) % 500}" for j in range(60 + i % 200)) for i in range(ROWS)]})
args = SFTConfig(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=8, max_length=LENGTH, packing=True,
                 packing_strategy="wrapped", max_steps=3, bf16=True, gradient_checkpointing=False, report_to=[],
                 save_strategy="no", logging_steps=1, dataset_text_field="text", learning_rate=2e-4)
trainer = SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer,
                     peft_config=LoraConfig(r=32, lora_alpha=64, lora_dropout=0.05, task_type="CAUSAL_LM",
                                            target_modules=["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]))
trainer.train()
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
