"""Whisper fine-tuned on log-mel features; encoder's positions frozen; then a short greedy transcription."""
import json

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

D, LAYERS, BATCH, TOKENS = 768, 8, 8, 128

config = WhisperConfig(d_model=D, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=D // 64,
                       decoder_attention_heads=D // 64, encoder_ffn_dim=4 * D, decoder_ffn_dim=4 * D, dropout=0.1)
model = WhisperForConditionalGeneration(config).cuda()
model.config.use_cache = False
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
scaler = torch.amp.GradScaler("cuda")
model.train()
for step in range(3):
    features = torch.randn(BATCH, 80, 3000, device="cuda")
    labels = torch.randint(0, 50000, (BATCH, TOKENS), device="cuda")
    labels[:, -16:] = -100
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(input_features=features, labels=labels).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(step, loss.item())

model.eval()
with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
    hidden = model.get_encoder()(features).last_hidden_state
    tokens = torch.full((BATCH, 1), config.decoder_start_token_id, device="cuda")
    for _ in range(8):
        logits = model(encoder_outputs=(hidden,), decoder_input_ids=tokens).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
