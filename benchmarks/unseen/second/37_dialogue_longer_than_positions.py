import random
from itertools import chain

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

BOS, EOS, SPEAKER1, SPEAKER2, PAD = 0, 1, 2, 3, 4


def make_dialogs(n=24, seed=11):
    rng = random.Random(seed)
    utterance = lambda: [rng.randrange(5, 90) for _ in range(rng.randint(4, 12))]
    return [{"persona": utterance(), "history": [utterance() for _ in range(rng.randint(1, 7))], "reply": utterance()}
            for _ in range(n)]


def build_input_from_segments(dialog):
    sequence = [[BOS] + dialog["persona"]] + dialog["history"] + [dialog["reply"] + [EOS]]
    sequence = [sequence[0]] + [[SPEAKER2 if i % 2 else SPEAKER1] + s for i, s in enumerate(sequence[1:])]
    input_ids = list(chain(*sequence))
    labels = [-100] * (len(input_ids) - len(sequence[-1])) + sequence[-1]
    return torch.tensor(input_ids), torch.tensor(labels)


def collate(dialogs):
    ids, labels = zip(*map(build_input_from_segments, dialogs))
    return pad_sequence(ids, True, PAD), pad_sequence(labels, True, -100)


def train():
    random.seed(0)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = GPT2Config(vocab_size=90, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    loader = DataLoader(make_dialogs(), batch_size=4, shuffle=True, collate_fn=collate)
    model.train()
    for epoch in range(2):
        for input_ids, labels in loader:
            loss = model(input_ids.to(device), labels=labels.to(device)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    train()
