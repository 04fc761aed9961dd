"""Weights and gradients in bf16 on the GPU; master weights and Adam's state in fp32 on the host, a layer at a time."""
import json

import torch
from transformers import Phi3Config, Phi3ForCausalLM

HIDDEN, LAYERS, HEADS, WIDE, VOCAB = 2048, 20, 32, 5632, 32064
BATCH, LENGTH, STEPS = 4, 1536, 3

torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
config = Phi3Config(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=8,
                    intermediate_size=WIDE, vocab_size=VOCAB, pad_token_id=0, use_cache=False, tie_word_embeddings=False)
with torch.device("cuda"):
    model = Phi3ForCausalLM(config)
torch.set_default_dtype(torch.float32)
model.train()

masters, optimizers = {}, {}
for p in model.parameters():
    master = p.detach().to("cpu", torch.float32).requires_grad_(True)
    masters[p] = master
    optimizers[p] = torch.optim.Adam([master], lr=1e-5)


def step_on_host(p):
    """Called as soon as a gradient is whole: it leaves the GPU at once."""
    master = masters[p]
    master.grad = p.grad.to("cpu", torch.float32)
    p.grad = None
    optimizers[p].step()
    master.grad = None
    with torch.no_grad():
        p.copy_(master)


for p in model.parameters():
    p.register_post_accumulate_grad_hook(step_on_host)
for step in range(STEPS):
    ids = torch.randint(1, VOCAB, (BATCH, LENGTH), device="cuda")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
