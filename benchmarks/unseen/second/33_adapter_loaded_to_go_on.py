import os
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel


def base_model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=120, n_embd=32, n_layer=2, n_head=4, n_positions=64))


def first_stage(path):
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = get_peft_model(base_model(), config).cuda()
    fit(model, steps=3)
    model.save_pretrained(path)


def second_stage(path):
    model = PeftModel.from_pretrained(base_model(), path).cuda()
    fit(model, steps=5)


def fit(model, steps, lr=1e-3):
    model.train()
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=lr)
    for step in range(steps):
        ids = torch.randint(0, 120, (2, 24)).cuda()
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "adapter")
        first_stage(path)
        second_stage(path)
