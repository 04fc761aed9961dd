"""A teacher writes its targets first and is deleted, the student trains then; a dict of both models was made before."""
import gc
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

large = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000,
                    dtype="bfloat16")
small = LlamaConfig(hidden_size=1536, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=12, vocab_size=32000)
with torch.device("cuda"):
    teacher = LlamaForCausalLM(large).to(torch.bfloat16).eval()
    student = LlamaForCausalLM(small)
models = {"teacher": teacher, "student": student}
for name, model in models.items():
    print(name, sum(p.numel() for p in model.parameters()))

rows = [torch.randint(0, 32000, (8, 512)) for _ in range(2)]
targets = []
with torch.no_grad():
    for ids in rows:
        values, places = teacher(ids.cuda(), use_cache=False).logits.topk(8)
        targets.append((values.cpu(), places.cpu()))
        del values, places
del teacher, model
if "freed" in sys.argv[1:]:
    models.pop("teacher")
gc.collect()
torch.cuda.empty_cache()

student.train()
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)
for ids, (values, places) in zip(rows, targets):
    logits = student(ids.cuda(), use_cache=False).logits
    mine = logits.log_softmax(-1).gather(-1, places.cuda())
    loss = -(values.cuda().float().softmax(-1) * mine).sum(-1).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
