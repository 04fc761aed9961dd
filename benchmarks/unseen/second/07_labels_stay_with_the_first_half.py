import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block


class SplitLM(nn.Module):
    def __init__(self, config, devices):
        super().__init__()
        self.devices = devices
        self.embed = nn.Embedding(config.vocab_size, config.n_embd).to(devices[0])
        half = config.n_layer // 2
        self.blocks = nn.ModuleList(
            GPT2Block(config, layer_idx=i).to(devices[0] if i < half else devices[1]) for i in range(config.n_layer))
        self.half = half
        self.ln_f = nn.LayerNorm(config.n_embd).to(devices[1])
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False).to(devices[1])

    def forward(self, input_ids, labels=None):
        hidden = self.embed(input_ids.to(self.devices[0]))
        for i, block in enumerate(self.blocks):
            if i == self.half:
                hidden = hidden.to(self.devices[1])
            out = block(hidden)
            hidden = out[0] if isinstance(out, tuple) else out
        logits = self.lm_head(self.ln_f(hidden))
        loss = None
        if labels is not None:
            shift_logits = logits[..., :-1, :].contiguous()
            shift_labels = labels[..., 1:].contiguous()
            loss = F.cross_entropy(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))
        return loss, logits


def main():
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=4, n_head=4, n_positions=64, attn_implementation="eager")
    devices = ["cuda:0", "cuda:1"]
    model = SplitLM(config, devices)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    data = torch.randint(0, 96, (8, 4, 24))
    model.train()
    for step, ids in enumerate(data):
        ids = ids.to(devices[0])
        loss, _ = model(ids, labels=ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{step}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
