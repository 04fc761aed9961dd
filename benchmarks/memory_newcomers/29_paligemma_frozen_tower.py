"""PaliGemma 3B in bf16: tower frozen, connector and language model tuned whole by SGD with momentum."""
import json

import torch
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

HIDDEN, LAYERS, HEADS, WIDE, VOCAB, HEAD_DIM = 2048, 18, 8, 16384, 257216, 256
TOWER, DEPTH, TOWER_HEADS, TOWER_WIDE, SIDE = 1152, 27, 16, 4304, 224
BATCH, TEXT, STEPS = 8, 64, 3
IMAGE = 257152 if VOCAB > 257152 else VOCAB - 1

places = (SIDE // 14) ** 2
config = PaliGemmaConfig(
    vision_config={"model_type": "siglip_vision_model", "hidden_size": TOWER, "num_hidden_layers": DEPTH, "image_size": SIDE,
                   "num_attention_heads": TOWER_HEADS, "intermediate_size": TOWER_WIDE, "patch_size": 14,
                   "projection_dim": HIDDEN, "vision_use_head": False},
    text_config={"model_type": "gemma", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
                 "num_key_value_heads": 1, "head_dim": HEAD_DIM, "intermediate_size": WIDE, "vocab_size": VOCAB,
                 "num_image_tokens": places},
    projection_dim=HIDDEN, hidden_size=HIDDEN, image_token_index=IMAGE, image_token_id=IMAGE,
)
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = PaliGemmaForConditionalGeneration(config)
torch.set_default_dtype(torch.float32)
for name, p in model.named_parameters():
    p.requires_grad = "vision_tower" not in name
model.train()
opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9, nesterov=True)
for step in range(STEPS):
    ids = torch.randint(10, 1000, (BATCH, places + TEXT), device="cuda")
    ids[:, :places] = IMAGE
    types = torch.zeros_like(ids)
    types[:, places + TEXT // 2:] = 1
    labels = ids.masked_fill(types == 0, -100)
    pixels = torch.randn(BATCH, 3, SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    loss = model(input_ids=ids, pixel_values=pixels, token_type_ids=types, attention_mask=torch.ones_like(ids), labels=labels).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
