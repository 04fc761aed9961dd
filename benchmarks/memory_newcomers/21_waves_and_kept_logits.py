"""Memory in waves: training on ragged batches, an evaluation that keeps its logits, a cap on the process, a second model."""
import gc
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

HIDDEN, LAYERS, HEADS, VOCAB = 1024, 16, 16, 50304
BATCH, LENGTHS, EVALS, ROUNDS = 8, (256, 1024, 640, 1280, 384), 6, 2

torch.cuda.set_per_process_memory_fraction(0.5)
torch.manual_seed(1)


def build():
    config = GPTNeoXConfig(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                           intermediate_size=4 * HIDDEN, vocab_size=VOCAB, use_cache=False, max_position_embeddings=2048)
    return GPTNeoXForCausalLM(config).to("cuda")


def train(model):
    opt = torch.optim.NAdam(model.parameters(), lr=1e-5)
    model.train()
    for length in LENGTHS:
        ids = torch.randint(0, VOCAB, (BATCH, length), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
    return loss.item()


@torch.no_grad()
def evaluate(model):
    model.eval()
    kept, labels = [], []
    for _ in range(EVALS):
        ids = torch.randint(0, VOCAB, (BATCH, 512), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            kept.append(model(input_ids=ids).logits)
        labels.append(ids)
    logits, labels = torch.cat(kept), torch.cat(labels)
    del kept
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:]).float().mean()
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB).float(), labels[:, 1:].reshape(-1))
    return right.item(), loss.item()


for wave in range(ROUNDS):
    model = build()
    print(wave, train(model), *evaluate(model), torch.cuda.memory_allocated() >> 20)
    model = None
    gc.collect()
    torch.cuda.empty_cache()
    big = torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda")
    big.zero_()
    del big
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
