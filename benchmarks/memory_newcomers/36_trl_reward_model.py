"""TRL's RewardTrainer: a Qwen2 with one score, LoRA, bf16, pairs of differing length."""
import json
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForSequenceClassification
from trl import RewardConfig, RewardTrainer

HIDDEN, LAYERS, HEADS, WIDE, VOCAB = 1536, 28, 12, 8960, 151936
BATCH, LENGTH, STEPS, ROWS = 4, 1024, 3, 64

words = {f"w{i}": i + 3 for i in range(2000)} | {"<pad>": 0, "<s>": 1, "</s>": 2}
raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
draw = torch.Generator().manual_seed(0)


def text(n):
    return " ".join(f"w{i}" for i in torch.randint(0, 2000, (n,), generator=draw).tolist())


def length():
    return int(torch.randint(LENGTH // 3, LENGTH - 40, (1,), generator=draw))


rows = [{"prompt": text(30), "chosen": text(length()), "rejected": text(length())} for _ in range(ROWS)]
config = Qwen2Config(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=2,
                     intermediate_size=WIDE, vocab_size=VOCAB, num_labels=1, pad_token_id=0, tie_word_embeddings=True)
with torch.device("cuda"):
    model = Qwen2ForSequenceClassification(config).to(torch.bfloat16)
args = RewardConfig(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=BATCH,
    max_steps=STEPS,
    max_length=LENGTH,
    bf16=True,
    gradient_checkpointing=False,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
peft_config = LoraConfig(task_type="SEQ_CLS", r=16, lora_alpha=32, target_modules="all-linear", modules_to_save=["score"])
RewardTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, peft_config=peft_config).train()
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
