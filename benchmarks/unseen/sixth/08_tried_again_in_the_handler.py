"""A batch that does not fit is taken again in four parts: inside the handler, or (outside) once it has been left."""
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
                     vocab_size=50304, max_position_embeddings=2048)
model = LlamaForCausalLM(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
model.train()


def forward_backward(ids, share=1.0):
    loss = model(input_ids=ids, labels=ids).loss * share
    loss.backward()
    return loss.detach()


def inside(ids):
    try:
        return forward_backward(ids)
    except torch.cuda.OutOfMemoryError:
        print("full: in four parts")
        optimizer.zero_grad()
        torch.cuda.empty_cache()
        return sum(forward_backward(part, 0.25) for part in ids.chunk(4))


def outside(ids):
    try:
        return forward_backward(ids)
    except torch.cuda.OutOfMemoryError:
        print("full: in four parts")
    optimizer.zero_grad()
    torch.cuda.empty_cache()
    return sum(forward_backward(part, 0.25) for part in ids.chunk(4))


train = outside if "outside" in sys.argv[1:] else inside
for step in range(2):
    loss = train(torch.randint(0, 50304, (16, 1024), device="cuda"))
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss)
