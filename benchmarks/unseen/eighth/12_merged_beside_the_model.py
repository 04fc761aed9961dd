"""LoRA on 7B with a 24 GB card; at the end the merged model is written. --in-place merges into the model itself."""
import argparse
import copy

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

cli = argparse.ArgumentParser()
cli.add_argument("--in-place", action="store_true")
cli.add_argument("--out", default="merged")
cli = cli.parse_args()

base = LlamaForCausalLM._from_config(
    LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000),
    dtype=torch.bfloat16,
)
model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
model.to("cuda:0")
model.gradient_checkpointing_enable()
model.enable_input_require_grads()
model.config.use_cache = False
model.print_trainable_parameters()

opt = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
scaler_free = torch.autocast("cuda", dtype=torch.bfloat16)
for step in range(3):
    ids = torch.randint(0, 32000, (1, 1024), device="cuda:0")
    with scaler_free:
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    print(f"{step}: {loss.item():.4f}")

if cli.in_place:
    merged = model.merge_and_unload()
else:
    keep_training_later = model
    merged = copy.deepcopy(model).merge_and_unload()
merged.config.use_cache = True
merged.eval()
with torch.inference_mode():
    answer = merged.generate(input_ids=torch.tensor([[1, 450, 7483, 310]], device="cuda:0"), max_new_tokens=16, do_sample=False)
print(answer.shape)
merged.save_pretrained(cli.out)
