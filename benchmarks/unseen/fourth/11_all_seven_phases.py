"""Load, first step, steady steps, evaluation, generation, saving and resuming in one plain loop."""
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=1024)
model = LlamaForCausalLM(config).to("cuda")
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(rows):
    return torch.randint(0, 1024, (rows, 64), device="cuda")


def train(steps):
    model.train()
    for _ in range(steps):
        ids = batch(4)
        model(input_ids=ids, labels=ids).loss.backward()
        opt.step()
        opt.zero_grad()


train(3)
model.eval()
with torch.inference_mode():
    ids = batch(32)
    print(model(input_ids=ids, labels=ids).loss.item())
train(1)
model.eval()
print(model.generate(batch(2), max_new_tokens=8, do_sample=True).shape)
torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, "/tmp/foreign-11.pt")
kept = torch.load("/tmp/foreign-11.pt", map_location="cpu")
model.load_state_dict(kept["model"])
opt.load_state_dict(kept["opt"])
train(2)
