"""Trains, validates, generates, keeps its state by torch.save, safetensors and DCP, and goes on from each."""
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_model, save_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=512,
                     tie_word_embeddings=False)
model = LlamaForCausalLM(config).cuda()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(steps):
    model.train()
    for _ in range(steps):
        ids = torch.randint(0, 512, (4, 64), device="cuda")
        model(ids, labels=ids).loss.backward()
        opt.step()
        opt.zero_grad()


train(2)
model.eval()
with torch.no_grad():
    rows = torch.randint(0, 512, (8, 64), device="cuda")
    print(float(model(rows, labels=rows).loss))
train(1)
model.eval()
print(model.generate(rows[:1, :8], max_new_tokens=4, do_sample=False).shape)
torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, "kept.pt")
save_model(model, "kept.safetensors")
dcp.save({"model": model.state_dict()}, checkpoint_id="kept-dcp")
before = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
train(1)
state = torch.load("kept.pt", map_location="cuda")
model.load_state_dict(state["model"])
opt.load_state_dict(state["opt"])
train(1)
load_model(model, "kept.safetensors", device="cuda")
assert all(torch.equal(p.detach().cpu(), before[name]) for name, p in model.named_parameters())
train(1)
wanted = {"model": model.state_dict()}
dcp.load(wanted, checkpoint_id="kept-dcp")
model.load_state_dict(wanted["model"])
assert all(torch.equal(p.detach().cpu(), before[name]) for name, p in model.named_parameters())
train(1)
