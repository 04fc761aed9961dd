"""Contrastive learning with GradCache: embeddings of all without a graph, the loss on them, then chunk by chunk again."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import BertConfig, BertModel

HIDDEN, LAYERS, HEADS = 768, 12, 12
ROWS, CHUNK, LENGTH, STEPS = 2048, 128, 128, 3


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = BertModel(BertConfig(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                                         intermediate_size=4 * HIDDEN), add_pooling_layer=False)

    def forward(self, ids, mask):
        h = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        m = mask[..., None].to(h.dtype)
        return F.normalize((h * m).sum(1) / m.sum(1), dim=-1)


torch.manual_seed(0)
queries, docs = Tower().to("cuda"), Tower().to("cuda")
opt = torch.optim.AdamW([*queries.parameters(), *docs.parameters()], lr=2e-5)


def batch():
    ids = torch.randint(0, 30000, (ROWS, LENGTH), device="cuda")
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), device="cuda")
    return ids, (torch.arange(LENGTH, device="cuda") < lengths).long()


def embed(tower, ids, mask, states):
    out = []
    with torch.no_grad():
        for i, m in zip(ids.split(CHUNK), mask.split(CHUNK)):
            states.append(torch.cuda.get_rng_state())
            with torch.autocast("cuda", torch.bfloat16):
                out.append(tower(i, m).float())
    return torch.cat(out).requires_grad_()


def again(tower, ids, mask, states, grads):
    for i, m, state, g in zip(ids.split(CHUNK), mask.split(CHUNK), states, grads.split(CHUNK)):
        torch.cuda.set_rng_state(state)
        with torch.autocast("cuda", torch.bfloat16):
            e = tower(i, m).float()
        (e * g).sum().backward()


for step in range(STEPS):
    left, right = batch(), batch()
    seen_q, seen_d = [], []
    q, d = embed(queries, *left, seen_q), embed(docs, *right, seen_d)
    loss = F.cross_entropy(q @ d.T / 0.05, torch.arange(ROWS, device="cuda"))
    loss.backward()
    again(queries, *left, seen_q, q.grad)
    again(docs, *right, seen_d, d.grad)
    opt.step()
    opt.zero_grad()
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
