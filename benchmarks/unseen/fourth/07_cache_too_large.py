"""Tunes an adapter within the memory, then generates long answers for all prompts at once: the cache does not fit."""
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
                     num_key_value_heads=32, vocab_size=32000, max_position_embeddings=8192)
with torch.device("cuda"):
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
model.requires_grad_(False)
model.lm_head.requires_grad_(True)
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for ids in DataLoader(torch.randint(0, 32000, (4, 64)), batch_size=2):
    ids = ids.cuda()
    model(input_ids=ids, labels=ids).loss.backward()
    opt.step()
    opt.zero_grad()
model.eval()
for prompts in DataLoader(torch.randint(0, 32000, (64, 512)), batch_size=64):
    out = model.generate(prompts.cuda(), max_new_tokens=3, do_sample=False)
print(out.shape)
