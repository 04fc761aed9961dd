"""TRL's SFTTrainer with activations on the host: rows wrapped to 2,048 tokens, noisy embeddings, LoRA and both vocabularies whole."""
import json
import random
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

VOCAB, HIDDEN, LAYERS, HEADS, KV, WIDE = 96000, 2048, 20, 16, 4, 6912
LENGTH, BATCH, ROWS, STEPS = 2048, 3, 220, 3

random.seed(63)
torch.manual_seed(63)
words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"v{i}": i + 4 for i in range(6000)}
raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def story():
    own = random.sample(range(6000), 50)
    return " ".join(f"v{random.choice(own)}" for _ in range(random.randint(80, 900)))


data = Dataset.from_dict({"text": [story() for _ in range(ROWS)]}).train_test_split(test_size=30, seed=1)
config = LlamaConfig(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV,
                     intermediate_size=WIDE, max_position_embeddings=4096, tie_word_embeddings=False, pad_token_id=0,
                     bos_token_id=1, eos_token_id=2)
with torch.device("cuda"):
    model = LlamaForCausalLM(config).to(torch.bfloat16)

args = SFTConfig(
    output_dir=tempfile.mkdtemp(),
    max_length=LENGTH,
    packing=True,
    packing_strategy="wrapped",
    eval_packing=False,
    per_device_train_batch_size=BATCH,
    per_device_eval_batch_size=12,
    gradient_accumulation_steps=2,
    max_steps=STEPS,
    learning_rate=1e-4,
    optim="adafactor",
    neftune_noise_alpha=5,
    activation_offloading=True,
    gradient_checkpointing=False,
    bf16=True,
    eval_strategy="steps",
    eval_steps=3,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    seed=63,
)
trainer = SFTTrainer(
    model=model,
    args=args,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    processing_class=tokenizer,
    peft_config=LoraConfig(r=128, lora_alpha=64, use_rslora=True, target_modules="all-linear",
                           modules_to_save=["embed_tokens", "lm_head"], task_type="CAUSAL_LM"),
)
trainer.model.print_trainable_parameters()
trainer.train()
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
