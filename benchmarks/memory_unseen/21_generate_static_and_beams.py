"""Generation only: a static cache, then a dynamic one with beams, in fp16."""
import json

import torch
from transformers import FalconConfig, FalconForCausalLM, LlamaConfig, LlamaForCausalLM

LAYERS, HIDDEN, BATCH, PROMPT, NEW = 16, 2048, 16, 1024, 24

config = LlamaConfig(vocab_size=32000, hidden_size=HIDDEN, intermediate_size=5632, num_hidden_layers=LAYERS,
                     num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=4096, eos_token_id=None)
model = LlamaForCausalLM(config).half().eval().cuda()
prompt = torch.randint(3, 32000, (BATCH, PROMPT), device="cuda")
with torch.inference_mode():
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False,
                         cache_implementation="static", disable_compile=True, pad_token_id=0)
print("static", tuple(out.shape), torch.cuda.max_memory_allocated() / 2**30)
del model, out
torch.cuda.empty_cache()

config = FalconConfig(vocab_size=65024, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HIDDEN // 64,
                      multi_query=True, parallel_attn=True, bias=False, alibi=False, eos_token_id=None)
model = FalconForCausalLM(config).half().eval().cuda()
with torch.inference_mode():
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, num_beams=4,
                         do_sample=False, pad_token_id=0)
print("beams", tuple(out.shape))
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
