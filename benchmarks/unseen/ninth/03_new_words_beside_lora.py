"""LoRA for a 7B with three new special tokens. "LoRA of 7B fits on a 4090", they said.

python 03_new_words_beside_lora.py            # as in the blog post: modules_to_save
python 03_new_words_beside_lora.py --tokens   # only the three rows
"""
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

config = Qwen2Config(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    tie_word_embeddings=False,
    dtype="bfloat16",
)
NEW = [151665, 151666, 151667]

torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = Qwen2ForCausalLM(config)
torch.set_default_dtype(torch.float32)
model.config.use_cache = False
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

lora = dict(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
if "--tokens" in sys.argv:
    lora["trainable_token_indices"] = {"embed_tokens": NEW}
else:
    lora["modules_to_save"] = ["embed_tokens", "lm_head"]
model = get_peft_model(model, LoraConfig(**lora))
model.print_trainable_parameters()
model.train()

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for step in range(3):
    ids = torch.randint(0, 151665, (2, 512), device="cuda")
    ids[:, 0] = NEW[step]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
model.save_pretrained("new-words")
