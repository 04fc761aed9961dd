"""TRL's KTOTrainer on a Qwen3 0.6B: all weights, a frozen reference beside it, good and bad answers in one list."""
import json
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import KTOConfig, KTOTrainer

HIDDEN, LAYERS, HEADS, WIDE, VOCAB = 1024, 28, 16, 3072, 151936
BATCH, LENGTH, STEPS, ROWS = 4, 1024, 3, 48

torch.manual_seed(3)
draw = torch.Generator().manual_seed(3)
words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": i + 4 for i in range(4000)}
raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def text(low, high):
    n = int(torch.randint(low, high, (1,), generator=draw))
    return " ".join(f"w{i}" for i in torch.randint(0, 4000, (n,), generator=draw).tolist())


rows = Dataset.from_list([{"prompt": text(LENGTH // 16, LENGTH // 4), "completion": " " + text(LENGTH // 8, LENGTH // 2),
                           "label": i % 3 != 0} for i in range(ROWS)])
config = Qwen3Config(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS // 2,
                     intermediate_size=WIDE, head_dim=128, vocab_size=VOCAB, tie_word_embeddings=True, pad_token_id=0,
                     bos_token_id=1, eos_token_id=2)
with torch.device("cuda"):
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    reference = Qwen3ForCausalLM(config).to(torch.bfloat16)
reference.load_state_dict(model.state_dict())
args = KTOConfig(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=BATCH,
    max_steps=STEPS,
    max_length=LENGTH,
    beta=0.1,
    learning_rate=1e-6,
    bf16=True,
    gradient_checkpointing=False,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
trainer = KTOTrainer(model=model, ref_model=reference, args=args, train_dataset=rows, processing_class=tokenizer)
trainer.train()
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
