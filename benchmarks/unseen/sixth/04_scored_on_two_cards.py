"""Perplexity of an 8B model that is spread over two cards."""
import tempfile

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

folder = tempfile.mkdtemp()
LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, dtype="bfloat16",
            architectures=["LlamaForCausalLM"]).save_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="auto")
model.eval()
rows = torch.randint(0, 128256, (32, 2048))
losses = []
for ids in DataLoader(rows, batch_size=16):
    ids = ids.to(model.device)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        scores = logits[:, :-1].float()
        losses.append(F.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten().to(scores.device)))
        del logits, scores
print(torch.stack(losses).mean().exp())
