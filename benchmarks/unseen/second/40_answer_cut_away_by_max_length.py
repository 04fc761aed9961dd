import copy

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

MAX_LENGTH = 24


def encode(prompt_len, answer_len, generator):
    ids = torch.randint(3, 96, (prompt_len + answer_len,), generator=generator)
    labels = ids.clone()
    labels[:prompt_len] = -100
    ids, labels = ids[:MAX_LENGTH], labels[:MAX_LENGTH]
    pad = MAX_LENGTH - len(ids)
    return F.pad(ids, (0, pad), value=0), F.pad(labels, (0, pad), value=-100)


def make_pairs(n=12):
    generator = torch.Generator().manual_seed(2)
    for i in range(n):
        prompt = 26 if i == 7 else 6 + i % 5
        yield encode(prompt, 8, generator) + encode(prompt, 10, generator)


def get_batch_logps(logits, labels):
    labels = labels[:, 1:].clone()
    loss_mask = labels != -100
    labels[~loss_mask] = 0
    logps = torch.gather(logits[:, :-1].log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    return (logps * loss_mask).sum(-1) / loss_mask.sum(-1)


def dpo_loss(policy, reference, chosen, rejected, beta=0.1):
    with torch.no_grad():
        ref = get_batch_logps(reference(chosen[0]).logits, chosen[1]) - get_batch_logps(reference(rejected[0]).logits, rejected[1])
    pi = get_batch_logps(policy(chosen[0]).logits, chosen[1]) - get_batch_logps(policy(rejected[0]).logits, rejected[1])
    return -F.logsigmoid(beta * (pi - ref)).mean()


def main(device="cuda"):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         max_position_embeddings=64)
    policy = LlamaForCausalLM(config).to(device)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4)
    pairs = [torch.stack(t) for t in zip(*make_pairs())]
    for start in range(0, 12, 4):
        c_ids, c_labels, r_ids, r_labels = (t[start:start + 4].to(device) for t in pairs)
        loss = dpo_loss(policy, reference, (c_ids, c_labels), (r_ids, r_labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {start // 4} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
