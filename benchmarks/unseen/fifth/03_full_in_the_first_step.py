"""Full fine-tuning of a small decoder with long rows on a small card."""
import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

args = argparse.ArgumentParser()
args.add_argument("--batch-size", type=int, default=16)
args.add_argument("--length", type=int, default=1024)
args = args.parse_args()
config = LlamaConfig(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
                     vocab_size=50304, max_position_embeddings=2048)
model = LlamaForCausalLM(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
model.train()
for step in range(3):
    ids = torch.randint(0, 50304, (args.batch_size, args.length), device="cuda")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
