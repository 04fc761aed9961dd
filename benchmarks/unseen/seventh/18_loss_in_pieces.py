"""The output layer and its loss in pieces of 1024 tokens, gradients made on the way forward: no logits of 128k words are ever whole."""
import argparse

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM


class PiecewiseLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, target, piece):
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight)
        total = hidden.new_zeros((), dtype=torch.float32)
        n = target.numel()
        for i in range(0, n, piece):
            h, t = hidden[i : i + piece], target[i : i + piece]
            logits = (h @ weight.T).float()
            total += F.cross_entropy(logits, t, reduction="sum")
            d = torch.softmax(logits, dim=-1)
            del logits
            d[torch.arange(len(t), device=t.device), t] -= 1.0
            d = (d / n).to(hidden.dtype)
            d_hidden[i : i + piece] = d @ weight
            d_weight += d.T @ h
            del d
        ctx.save_for_backward(d_hidden, d_weight)
        return total / n

    @staticmethod
    def backward(ctx, grad):
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden.mul_(grad), d_weight.mul_(grad), None, None


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--rows", type=int, default=2)
    p.add_argument("--length", type=int, default=8192)
    p.add_argument("--steps", type=int, default=2)
    p.add_argument("--plain-loss", action="store_true")
    a = p.parse_args()

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=16384, use_cache=False,
    )).to(torch.bfloat16).cuda()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    model.train()
    opt = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(a.steps):
        ids = torch.randint(0, 128256, (a.rows, a.length + 1), device="cuda")
        hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state.flatten(0, 1)
        target = ids[:, 1:].flatten()
        if a.plain_loss:
            logits = model.lm_head(hidden)
            loss = F.cross_entropy(logits.float(), target)
        else:
            loss = PiecewiseLoss.apply(hidden, model.lm_head.weight, target, 1024)
        loss.backward()
        opt.step()
        opt.zero_grad()
        print(step, loss.item(), f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
