"""Phi-3 on instruction rows of very different lengths, padded to the longest of each batch; re-entrant checkpointing."""
import json
import random

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import Phi3Config, Phi3ForCausalLM

LAYERS, HIDDEN, ROWS, LONGEST = 10, 2048, 48, 2300

random.seed(1)
torch.manual_seed(1)
config = Phi3Config(
    vocab_size=32064, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS,
    num_attention_heads=HIDDEN // 128, num_key_value_heads=HIDDEN // 128, sliding_window=None, pad_token_id=32000,
)
device = torch.device("cuda:0")
model = Phi3ForCausalLM(config).to(device)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
model.config.use_cache = False

rows = [torch.randint(0, 32000, (random.randint(40, LONGEST),)) for _ in range(ROWS)]


def collate(batch):
    ids = pad_sequence(batch, batch_first=True, padding_value=32000)
    mask = (ids != 32000).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


loader = DataLoader(rows, batch_size=6, shuffle=True, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for batch in loader:
    batch = {k: v.to(device) for k, v in batch.items()}
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(tuple(batch["input_ids"].shape), round(torch.cuda.memory_reserved() / 2**30, 2), "GiB")

print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
