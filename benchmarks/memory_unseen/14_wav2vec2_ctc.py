"""wav2vec 2.0 with a CTC head, feature encoder frozen, fp32."""
import json

import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

LAYERS, HIDDEN, BATCH, SECONDS = 12, 768, 6, 10

torch.manual_seed(0)
config = Wav2Vec2Config(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HIDDEN // 64,
                        intermediate_size=4 * HIDDEN, vocab_size=32, ctc_loss_reduction="mean", ctc_zero_infinity=True,
                        mask_time_prob=0.05, layerdrop=0.0)
model = Wav2Vec2ForCTC(config)
model.freeze_feature_encoder()
model.to("cuda").train()
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-5)
for step in range(3):
    wave = torch.randn(BATCH, 16000 * SECONDS, device="cuda")
    labels = torch.randint(1, 32, (BATCH, 12 * SECONDS), device="cuda")
    loss = model(wave, labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
