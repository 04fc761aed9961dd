"""A Qwen3 of 0.6B becomes an embedder: questions, passages, hard negatives; a large batch by cached gradients, several widths at once."""
import json
import random
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3Model

VOCAB, PAD, HIDDEN, LAYERS = 151669, 0, 1024, 28
QUESTIONS, NEGATIVES, CHUNK, STEPS = 96, 2, 16, 3
WIDTHS, WARMTH = (1024, 512, 256, 64), 0.02


class Replay:
    """The random state of a chunk, so that dropout falls alike the second time."""

    def __init__(self):
        self.cpu, self.gpu = torch.get_rng_state(), torch.cuda.get_rng_state()

    def __enter__(self):
        self.fork = torch.random.fork_rng(devices=[torch.cuda.current_device()])
        self.fork.__enter__()
        torch.set_rng_state(self.cpu)
        torch.cuda.set_rng_state(self.gpu)

    def __exit__(self, *error):
        return self.fork.__exit__(*error)


def texts(count, shortest, longest):
    return [torch.randint(1, VOCAB, (random.randint(shortest, longest),)) for _ in range(count)]


def chunks(rows):
    for start in range(0, len(rows), CHUNK):
        part = rows[start : start + CHUNK]
        longest = max(map(len, part))
        ids = torch.stack([F.pad(row, (longest - len(row), 0), value=PAD) for row in part]).cuda()
        yield {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def embed(model, batch):
    with torch.autocast("cuda", torch.bfloat16):
        last = model(**batch, use_cache=False).last_hidden_state[:, -1]
    return last.float()


def contrast(questions, passages):
    own = torch.arange(len(questions), device=questions.device)
    total = 0
    for width in WIDTHS:
        q, p = F.normalize(questions[:, :width], dim=-1), F.normalize(passages[:, :width], dim=-1)
        total = total + F.cross_entropy(q @ p.T / WARMTH, own)
    return total / len(WIDTHS)


def step(model, sides):
    kept, states = [], []
    with torch.no_grad():
        for rows in sides:
            found, seen = [], []
            for batch in chunks(rows):
                seen.append(Replay())
                found.append(embed(model, batch))
            kept.append(torch.cat(found).requires_grad_())
            states.append(seen)
    loss = contrast(*kept)
    loss.backward()
    for rows, vectors, seen in zip(sides, kept, states):
        for batch, slope, state in zip(chunks(rows), vectors.grad.split(CHUNK), seen):
            with state or nullcontext():
                again = embed(model, batch)
            torch.autograd.backward(again, slope)
    return loss.item()


random.seed(8)
torch.manual_seed(8)
config = Qwen3Config(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=16, num_key_value_heads=8,
                     head_dim=128, intermediate_size=3072, max_position_embeddings=4096, pad_token_id=PAD)
with torch.device("cuda"):
    base = Qwen3Model(config)
model = get_peft_model(base, LoraConfig(r=64, lora_alpha=64, lora_dropout=0.1, bias="none", target_modules="all-linear",
                                        task_type="FEATURE_EXTRACTION"))
model.train()
model.print_trainable_parameters()
optimizer = torch.optim.NAdam([p for p in model.parameters() if p.requires_grad], lr=2e-4)
for number in range(STEPS):
    sides = texts(QUESTIONS, 12, 60), texts(QUESTIONS * (1 + NEGATIVES), 100, 480)
    loss = step(model, sides)
    optimizer.step()
    optimizer.zero_grad()
    print(number, loss)

model.eval()
with torch.no_grad():
    corpus = torch.cat([embed(model, batch) for batch in chunks(texts(160, 100, 640))])
    asked = torch.cat([embed(model, batch) for batch in chunks(texts(32, 12, 60))])
    print("nearest", (F.normalize(asked, dim=-1) @ F.normalize(corpus, dim=-1).T).topk(5).indices[0].tolist())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
