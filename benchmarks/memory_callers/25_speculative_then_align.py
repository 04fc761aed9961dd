"""A large and a small Llama: assisted generation with both caches, then the small one learns from what the large one says."""
import json

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

TARGET = dict(hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8)
DRAFT = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=10, num_attention_heads=16, num_key_value_heads=4)
VOCAB, PROMPT, NEW, ROUNDS = 128256, 6000, 32, 2
BATCH, LENGTH, STEPS = 4, 1024, 3


def build(shape):
    config = LlamaConfig(**shape, vocab_size=VOCAB, tie_word_embeddings=True, max_position_embeddings=8192, bos_token_id=1,
                         eos_token_id=None, pad_token_id=0)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


torch.manual_seed(6)
target, draft = build(TARGET), build(DRAFT)
target.requires_grad_(False)
said = []
for turn in range(ROUNDS):
    prompt = torch.randint(2, VOCAB, (1, PROMPT), device="cuda")
    out = target.generate(prompt, attention_mask=torch.ones_like(prompt), assistant_model=draft, max_new_tokens=NEW, do_sample=False)
    said.append(out[0, -min(LENGTH, out.shape[1]):])
    print(turn, out.shape)

draft.train()
optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-5, foreach=False)
for step in range(STEPS):
    ids = torch.randint(2, VOCAB, (BATCH, LENGTH), device="cuda")
    ids[0, -len(said[step % ROUNDS]):] = said[step % ROUNDS]
    with torch.no_grad():
        goal = target(input_ids=ids, use_cache=False).logits.float().softmax(-1)
    guess = draft(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
    loss = F.kl_div(guess, goal, reduction="none").sum(-1).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    agree = (guess.argmax(-1) == goal.argmax(-1)).float().mean()
    print(step, loss.item(), agree.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
