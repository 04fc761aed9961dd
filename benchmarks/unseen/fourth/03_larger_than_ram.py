"""A 35B Llama whose files (sparse, made here) are larger than this machine's memory, spread by device_map="auto"."""
import json
import os
import struct
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

folder = "/tmp/foreign-35b"
config = LlamaConfig(hidden_size=8192, intermediate_size=22016, num_hidden_layers=42, num_attention_heads=64,
                     num_key_value_heads=8, vocab_size=32000, dtype="bfloat16", architectures=["LlamaForCausalLM"])
if not os.path.exists(folder + "/config.json"):
    os.makedirs(folder, exist_ok=True)
    config.save_pretrained(folder)
    with torch.device("meta"):
        names = {n: list(p.shape) for n, p in LlamaForCausalLM(config).state_dict().items()}
    head, at = {}, 0
    for name, shape in names.items():
        size = 2
        for n in shape:
            size *= n
        head[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with open(folder + "/model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    if "make" in sys.argv:
        raise SystemExit
model = AutoModelForCausalLM.from_pretrained(
    folder, device_map="auto", dtype=torch.bfloat16, max_memory={0: "20GiB", 1: "30GiB", "cpu": "60GiB"})
print({str(d) for d in model.hf_device_map.values()})
ids = torch.randint(0, 32000, (1, 16), device="cuda:0")
with torch.no_grad():
    out = model(input_ids=ids)
print(out.logits.shape, out.logits.device)
print(model.generate(ids, max_new_tokens=4).shape)
