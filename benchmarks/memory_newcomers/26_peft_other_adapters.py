"""PEFT's other adapters, one after the other on one Qwen3 1.7B: IA3, VeRA, LoHa, prefix tuning, prompt tuning."""
import gc
import json

import torch
from peft import IA3Config, LoHaConfig, PrefixTuningConfig, PromptTuningConfig, VeraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

HIDDEN, LAYERS, HEADS, WIDE, VOCAB = 2048, 28, 16, 6144, 151936
BATCH, LENGTH, STEPS = 4, 768, 2

config = Qwen3Config(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=8,
                     head_dim=HIDDEN // HEADS, intermediate_size=WIDE, vocab_size=VOCAB, tie_word_embeddings=True)
adapters = {
    "ia3": IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "vera": VeraConfig(task_type="CAUSAL_LM", r=256, target_modules=["q_proj", "o_proj"]),
    "loha": LoHaConfig(task_type="CAUSAL_LM", r=8, alpha=16, target_modules=["q_proj", "v_proj", "up_proj"]),
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=32),
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=64),
}
for name, adapter in adapters.items():
    torch.manual_seed(0)
    with torch.device("cuda"):
        base = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model = get_peft_model(base, adapter).to("cuda")
    model.train()
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(STEPS):
        ids = torch.randint(0, VOCAB, (BATCH, LENGTH), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
    print(name, loss.item(), torch.cuda.max_memory_allocated() >> 20)
    del base, model, opt, loss
    gc.collect()
    torch.cuda.empty_cache()
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
