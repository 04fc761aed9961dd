"""Sampling from a Mistral with a sliding window: long prompts, many answers each, then a cache kept on the host."""
import json

import torch
from transformers import MistralConfig, MistralForCausalLM

HIDDEN, LAYERS, HEADS, WIDE, VOCAB, WINDOW = 2048, 24, 16, 7168, 32768, 1024
PROMPTS, PROMPT, ANSWERS, NEW = 4, 3072, 4, 24

torch.manual_seed(0)
config = MistralConfig(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=4,
                       intermediate_size=WIDE, vocab_size=VOCAB, sliding_window=WINDOW, pad_token_id=0, eos_token_id=None,
                       max_position_embeddings=8192)
with torch.device("cuda"):
    model = MistralForCausalLM(config).to(torch.bfloat16).eval()
ids = torch.randint(1, VOCAB, (PROMPTS, PROMPT), device="cuda")
mask = torch.ones_like(ids)
mask[1:, : PROMPT // 5] = 0
out = model.generate(ids, attention_mask=mask, do_sample=True, num_return_sequences=ANSWERS, max_new_tokens=NEW, min_new_tokens=NEW,
                     output_scores=True, return_dict_in_generate=True)
print(out.sequences.shape, len(out.scores), torch.cuda.max_memory_allocated() >> 20)
del out
out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, cache_implementation="offloaded")
print(out.shape, torch.cuda.max_memory_allocated() >> 20)
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
