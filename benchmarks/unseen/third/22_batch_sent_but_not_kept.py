"""Fine-tune a small BERT on intent classification of support tickets."""
import random

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification

CFG = dict(vocab_size=400, max_len=24, n_intents=5, batch_size=8, lr=5e-5, epochs=1)


class TicketDataset(Dataset):
    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.rows = []
        for _ in range(n):
            label = rng.randrange(CFG["n_intents"])
            length = rng.randint(6, CFG["max_len"] - 2)
            words = [rng.randint(10 + 70 * label, 79 + 70 * label) for _ in range(length)]
            self.rows.append(([1] + words + [2], label))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, (tokens, _) in enumerate(rows):
        ids[i, :len(tokens)] = torch.tensor(tokens)
        mask[i, :len(tokens)] = 1
    labels = torch.tensor([label for _, label in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def send_to(batch, device):
    for key in batch:
        batch[key].to(device, non_blocking=True)
    return batch


def train_epoch(model, loader, optimizer, device):
    model.train()
    total = 0.0
    for batch in loader:
        batch = send_to(batch, device)
        out = model(**batch)
        optimizer.zero_grad()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += out.loss.item()
    return total / len(loader)


if __name__ == "__main__":
    random.seed(13)
    torch.manual_seed(13)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = BertConfig(vocab_size=CFG["vocab_size"], hidden_size=32, num_hidden_layers=2,
                        num_attention_heads=2, intermediate_size=64,
                        max_position_embeddings=CFG["max_len"], num_labels=CFG["n_intents"])
    model = BertForSequenceClassification(config).to(device)
    loader = DataLoader(TicketDataset(64, seed=1), batch_size=CFG["batch_size"], shuffle=True,
                        collate_fn=collate, pin_memory=torch.cuda.is_available())
    optimizer = torch.optim.AdamW(model.parameters(), lr=CFG["lr"], weight_decay=0.01)
    for epoch in range(CFG["epochs"]):
        print("epoch", epoch, "loss", round(train_epoch(model, loader, optimizer, device), 4))
