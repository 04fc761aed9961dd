"""A folder has a config and the index of its shards, and not the shards themselves yet; spread over the GPUs."""
import json
import os
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

folder = tempfile.mkdtemp()
config = LlamaConfig(
    hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40, vocab_size=32000,
    max_position_embeddings=4096, dtype="bfloat16", architectures=["LlamaForCausalLM"],
)
config.save_pretrained(folder)
parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
         "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")
names = [f"model.layers.{n}.{part}.weight" for n in range(40) for part in parts]
names += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
where = {name: f"model-{1 + n % 6:05d}-of-00006.safetensors" for n, name in enumerate(names)}
with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
    json.dump({"metadata": {"total_size": 26_031_728_640}, "weight_map": where}, file)

model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="balanced")
assert set(model.hf_device_map.values()) == {0, 1}, model.hf_device_map
ids = torch.randint(0, 32000, (1, 256), device=model.device)
model.eval()
with torch.no_grad():
    print(model(ids).logits.shape)
print(model.generate(ids[:, :32], max_new_tokens=6, do_sample=False).shape)
print([torch.cuda.max_memory_allocated(n) // 2**30 for n in range(2)])
