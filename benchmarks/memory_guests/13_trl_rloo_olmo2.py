"""TRL's RLOOTrainer: an OLMo 2 of 1B with LoRA against its own start (the KL in the reward), sampled answers, two passes each."""
import json
import random
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Olmo2Config, Olmo2ForCausalLM, PreTrainedTokenizerFast
from trl import RLOOConfig, RLOOTrainer

HIDDEN, LAYERS, HEADS, WIDE, VOCAB = 2048, 16, 16, 8192, 100352
GROUP, BATCH, ANSWER, PROMPT, STEPS = 4, 16, 160, 420, 3

random.seed(9)
torch.manual_seed(9)
words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": i + 4 for i in range(3000)}
raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
                                    unk_token="<unk>", padding_side="left")
rows = Dataset.from_list([
    {"prompt": " ".join(f"w{random.randrange(3000)}" for _ in range(random.randint(PROMPT // 4, PROMPT)))} for _ in range(48)
])


def variety(completions, **_):
    """More for an answer of many different words."""
    return [len(set(text.split())) / (1 + len(text.split())) for text in completions]


config = Olmo2Config(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
                     intermediate_size=WIDE, vocab_size=VOCAB, tie_word_embeddings=False, max_position_embeddings=4096,
                     pad_token_id=0, bos_token_id=1, eos_token_id=2)
with torch.device("cuda"):
    model = Olmo2ForCausalLM(config).to(torch.bfloat16)

args = RLOOConfig(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=BATCH,
    gradient_accumulation_steps=2,
    num_generations=GROUP,
    num_iterations=2,
    max_completion_length=ANSWER,
    temperature=0.9,
    beta=0.05,
    learning_rate=1e-5,
    max_steps=STEPS,
    gradient_checkpointing=False,
    bf16=True,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
trainer = RLOOTrainer(
    model=model,
    reward_funcs=variety,
    args=args,
    train_dataset=rows,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=32, lora_alpha=32, target_modules=["q_proj", "v_proj", "gate_proj"], task_type="CAUSAL_LM"),
)
trainer.train()
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
