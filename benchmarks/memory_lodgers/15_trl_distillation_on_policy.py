"""TRL's DistillationTrainer: a Qwen3 of 0.6B writes answers, one of 4B says at each word what it would have said."""
import json
import random
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import DistillationConfig, DistillationTrainer

VOCAB = 151936
STUDENT = dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, intermediate_size=3072)
TEACHER = dict(hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, intermediate_size=9728)
PROMPT, ANSWER, BATCH, STEPS = 380, 128, 6, 3

random.seed(41)
torch.manual_seed(41)
words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"t{i}": i + 4 for i in range(4000)}
raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
                                    padding_side="left")
prompts = [" ".join(f"t{random.randrange(4000)}" for _ in range(random.randint(PROMPT // 3, PROMPT))) for _ in range(60)]


def qwen(shape):
    config = Qwen3Config(**shape, head_dim=128, vocab_size=VOCAB, tie_word_embeddings=True, max_position_embeddings=4096,
                         pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with torch.device("cuda"):
        return Qwen3ForCausalLM(config).to(torch.bfloat16)


student, teacher = qwen(STUDENT), qwen(TEACHER).eval().requires_grad_(False)
args = DistillationConfig(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=BATCH,
    gradient_accumulation_steps=2,
    max_steps=STEPS,
    max_completion_length=ANSWER,
    temperature=0.9,
    beta=0.5,
    learning_rate=1e-6,
    optim="adamw_torch_fused",
    bf16=True,
    gradient_checkpointing=False,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    seed=41,
)
trainer = DistillationTrainer(
    model=student,
    teacher_model=teacher,
    args=args,
    train_dataset=Dataset.from_dict({"prompt": prompts}),
    processing_class=tokenizer,
)
trainer.train()
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
