"""InternVL on pictures cut into one to six tiles: the tower stays still, its projector learns whole, DoRA in a Qwen2 of 1.5B."""
import json
import random

import torch
from peft import LoraConfig, get_peft_model
from transformers import InternVLConfig, InternVLForConditionalGeneration, get_cosine_schedule_with_warmup

TEXT = dict(model_type="qwen2", hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
            intermediate_size=8960, vocab_size=151674, tie_word_embeddings=True, max_position_embeddings=32768)
VISION = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, image_size=[448, 448],
              patch_size=[14, 14], attention_bias=True)
TILE, IMAGE, PAD, PLACES = 448, 151667, 151643, 256
TILES = ((1, 4), (6, 2), (3, 3), (5, 1), (2, 6))
WORDS = 220

random.seed(3)
torch.manual_seed(3)
config = InternVLConfig(text_config=TEXT, vision_config=VISION, image_token_id=IMAGE, image_seq_length=PLACES,
                        downsample_ratio=0.5, tie_word_embeddings=True)
with torch.device("cuda"):
    model = InternVLForConditionalGeneration(config).to(torch.bfloat16)
model = get_peft_model(
    model,
    LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, use_dora=True, target_modules=r".*language_model.*\.(q_proj|v_proj|o_proj|up_proj)",
               modules_to_save=["multi_modal_projector"]),
)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.enable_input_require_grads()
model.train()
model.print_trainable_parameters()


def batch_of(counts):
    rows = []
    for tiles in counts:
        before = torch.randint(0, PAD, (12,))
        after = torch.randint(0, PAD, (random.randint(WORDS // 4, WORDS),))
        rows.append((torch.cat([before, torch.full((tiles * PLACES,), IMAGE), after]), len(after)))
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), longest), PAD)
    labels = torch.full_like(ids, -100)
    for n, (row, answer) in enumerate(rows):
        ids[n, : len(row)] = row
        labels[n, len(row) - answer : len(row)] = row[-answer:]
    pictures = torch.randn(sum(counts), 3, TILE, TILE)
    return {"input_ids": ids.cuda(), "attention_mask": (ids != PAD).long().cuda(), "labels": labels.cuda(),
            "pixel_values": pictures.cuda(non_blocking=True).bfloat16()}


optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, weight_decay=0.05, foreach=True)
schedule = get_cosine_schedule_with_warmup(optimizer, 1, len(TILES))
for step, counts in enumerate(TILES):
    total = 0.0
    for part in (counts, counts[::-1]):
        loss = model(**batch_of(part), use_cache=False).loss / 2
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    print(step, sum(counts), total)

model.eval()
with torch.inference_mode():
    print("held out", model(**batch_of((4, 4, 4, 4))).loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
