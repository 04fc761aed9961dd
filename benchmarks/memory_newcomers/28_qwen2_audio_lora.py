"""Qwen2-Audio, 7B shapes halved in depth: clips of ten to thirty seconds, PEFT LoRA in the language model, checkpointing."""
import json

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

HIDDEN, LAYERS, HEADS, WIDE, VOCAB = 4096, 16, 32, 11008, 156032
TOWER, DEPTH, TOWER_HEADS, TOWER_WIDE = 1280, 32, 20, 5120
BATCH, TEXT, STEPS = 4, 160, 3
AUDIO = 7

config = Qwen2AudioConfig(
    audio_config={"d_model": TOWER, "encoder_layers": DEPTH, "encoder_attention_heads": TOWER_HEADS,
                  "encoder_ffn_dim": TOWER_WIDE, "num_mel_bins": 128, "max_source_positions": 1500},
    text_config={"model_type": "qwen2", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
                 "num_key_value_heads": HEADS, "intermediate_size": WIDE, "vocab_size": VOCAB, "use_cache": False},
    audio_token_index=AUDIO,
)
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = Qwen2AudioForConditionalGeneration(config)
torch.set_default_dtype(torch.float32)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.enable_input_require_grads()
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=r".*language_model.*\.(q_proj|v_proj)"))
model.print_trainable_parameters()
model.train()
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

for step in range(STEPS):
    frames = [3000, 2000, 1400, 1000][:BATCH]
    features = torch.randn(BATCH, 128, 3000, device="cuda", dtype=torch.bfloat16)
    feature_mask = torch.zeros(BATCH, 3000, dtype=torch.long)
    tokens = []
    for row, n in enumerate(frames):
        feature_mask[row, :n] = 1
        tokens.append(((n - 1) // 2 + 1 - 2) // 2 + 1)
    width = max(tokens) + TEXT
    ids = torch.randint(100, 1000, (BATCH, width))
    mask = torch.ones(BATCH, width, dtype=torch.long)
    for row, n in enumerate(tokens):
        pad = width - n - TEXT
        mask[row, :pad] = 0
        ids[row, pad:pad + n] = AUDIO
    labels = ids.clone()
    labels[:, :-TEXT] = -100
    out = model(input_ids=ids.to("cuda"), attention_mask=mask.to("cuda"), input_features=features,
                feature_attention_mask=feature_mask.to("cuda"), labels=labels.to("cuda"))
    out.loss.backward()
    opt.step()
    opt.zero_grad()
    print(step, out.loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
