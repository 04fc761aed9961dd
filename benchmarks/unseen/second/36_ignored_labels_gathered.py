import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel

IGNORE_INDEX = -100


def build_example(prompt, answer):
    ids = torch.cat([prompt, answer])
    labels = ids.clone()
    labels[: len(prompt)] = IGNORE_INDEX
    return ids, labels


def collate(rows, pad=0):
    ids, labels = zip(*rows)
    return pad_sequence(ids, True, pad), pad_sequence(labels, True, IGNORE_INDEX)


def sequence_log_prob(logits, labels):
    labels = labels[:, 1:]
    logits = logits[:, :-1]
    mask = labels != IGNORE_INDEX
    per_token = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    return (per_token * mask).sum(-1) / mask.sum(-1)


def reinforce_step(model, optimizer, ids, labels, rewards):
    log_prob = sequence_log_prob(model(input_ids=ids).logits, labels)
    advantage = rewards - rewards.mean()
    loss = -(advantage * log_prob).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def main():
    torch.manual_seed(0)
    device = "cuda"
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=48)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(4):
        rows = [build_example(torch.randint(1, 64, (5 + i,)), torch.randint(1, 64, (9 - i,))) for i in range(4)]
        ids, labels = collate(rows)
        rewards = torch.rand(4, device=device)
        print(step, reinforce_step(model, optimizer, ids.to(device), labels.to(device), rewards))


if __name__ == "__main__":
    main()
