"""CLIP trained by its contrastive loss, pictures and texts, bf16 autocast."""
import json

import torch
from transformers import CLIPConfig, CLIPModel

TEXT = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8)
VISION = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, image_size=224,
              patch_size=16)
BATCH = 256

config = CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=512)
model = CLIPModel(config).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)
model.train()
for step in range(3):
    pixels = torch.rand(BATCH, 3, VISION["image_size"], VISION["image_size"]).to("cuda")
    ids = torch.randint(1, 49000, (BATCH, 77))
    ids[:, -1] = 49407
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(input_ids=ids.to("cuda"), pixel_values=pixels, attention_mask=torch.ones(BATCH, 77).long().to("cuda"),
                    return_loss=True)
    optimizer.zero_grad()
    out.loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.logit_scale.clamp_(0, 4.6052)
    print(step, out.loss.item(), model.logit_scale.exp().item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
