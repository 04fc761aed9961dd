"""BART on articles and summaries of all lengths, sorted in no way, empty_cache between epochs, generation at the end."""
import json
import random

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import BartConfig, BartForConditionalGeneration

D, LAYERS, ROWS, BATCH, ARTICLE, SUMMARY = 1024, 6, 40, 8, 1000, 200

random.seed(5)
config = BartConfig(vocab_size=50265, d_model=D, encoder_layers=LAYERS, decoder_layers=LAYERS,
                    encoder_attention_heads=16, decoder_attention_heads=16, encoder_ffn_dim=4 * D, decoder_ffn_dim=4 * D)
model = BartForConditionalGeneration(config).cuda()
rows = [(torch.randint(4, 50000, (random.randint(100, ARTICLE),)), torch.randint(4, 50000, (random.randint(20, SUMMARY),)))
        for _ in range(ROWS)]
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, weight_decay=0.01)
for epoch in range(2):
    random.shuffle(rows)
    model.train()
    for at in range(0, ROWS, BATCH):
        source = pad_sequence([r[0] for r in rows[at:at + BATCH]], batch_first=True, padding_value=1).cuda()
        target = pad_sequence([r[1] for r in rows[at:at + BATCH]], batch_first=True, padding_value=-100).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=source, attention_mask=(source != 1), labels=target).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.empty_cache()
    print(epoch, loss.item(), torch.cuda.memory_reserved() >> 20)
model.eval()
with torch.no_grad():
    made = model.generate(source, attention_mask=(source != 1).long(), num_beams=4, max_new_tokens=32, min_new_tokens=32)
print(tuple(made.shape))
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
