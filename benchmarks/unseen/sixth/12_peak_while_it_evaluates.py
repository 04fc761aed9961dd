"""Averaged weights are swapped in for an evaluation of larger batches; losses are kept, detached; kept and gone on from."""
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, vocab_size=50304)
model = LlamaForCausalLM(config).cuda()
average = {name: p.detach().clone() for name, p in model.named_parameters()}
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
history = []


def train(steps):
    model.train()
    for _ in range(steps):
        ids = torch.randint(0, 50304, (4, 512), device="cuda")
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.detach())
        with torch.no_grad():
            for name, p in model.named_parameters():
                average[name].lerp_(p, 0.1)


@torch.inference_mode()
def evaluate():
    model.eval()
    backup = {name: p.clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.copy_(average[name])
    losses = []
    for _ in range(2):
        ids = torch.randint(0, 50304, (64, 512), device="cuda")
        losses.append(model(input_ids=ids, labels=ids).loss.item())
    for name, p in model.named_parameters():
        p.copy_(backup[name])
    return sum(losses) / len(losses)


train(2)
print(evaluate())
train(1)
torch.save({"model": model.state_dict(), "average": average, "optimizer": optimizer.state_dict()}, "last.pt")
kept = torch.load("last.pt", map_location="cpu")
model.load_state_dict(kept["model"])
optimizer.load_state_dict(kept["optimizer"])
for name, value in kept["average"].items():
    average[name].copy_(value)
del kept
train(1)
print(evaluate(), torch.stack(history).mean().item(), len(history))
