"""A plain script that needs more than an H200 has: three LoRA steps of Llama 8B's shape on 4 rows of 4,096 tokens.

trimtab rehearse --gpus H200 --shapes-only benchmarks/memory_shortage.py      # out of memory, and what would save it
python benchmarks/memory_shortage.py --checkpointing                          # on the GPU: that change, taken
"""

import sys

import torch
from memory_cases import LLAMA_8
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig


def main() -> None:
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA_8))
    torch.set_default_dtype(torch.float32)
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    if "--checkpointing" in sys.argv:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for step in range(3):
        tokens = torch.randint(0, LLAMA_8["vocab_size"], (4, 4096), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, "peak GiB", torch.cuda.max_memory_allocated() / 2**30, flush=True)


if __name__ == "__main__":
    main()
