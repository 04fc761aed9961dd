"""Sentiment of reviews with a BERT encoder and LoRA, plain training loop."""
import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification


def reviews(n, vocab, length):
    labels = torch.randint(0, 2, (n,))
    ids = torch.randint(20, vocab, (n, length))
    ids[:, 0] = 1
    cue = torch.randint(1, length, (n,))
    ids[torch.arange(n), cue] = 10 + labels
    return TensorDataset(ids, torch.ones_like(ids), labels)


def build_model(args):
    # bert-base in the real run; small here so that it starts quickly
    config = BertConfig(vocab_size=args.vocab, hidden_size=48, num_hidden_layers=2,
                        num_attention_heads=4, intermediate_size=96,
                        max_position_embeddings=64, num_labels=2)
    model = BertForSequenceClassification(config)
    lora = LoraConfig(
        r=args.rank,
        lora_alpha=2 * args.rank,
        lora_dropout=0.05,
        bias="none",
        target_modules=["query", "value"],
    )
    return get_peft_model(model, lora)


def accuracy(model, loader, device):
    model.eval()
    hits, seen = 0, 0
    with torch.no_grad():
        for ids, mask, labels in loader:
            out = model(input_ids=ids.to(device), attention_mask=mask.to(device))
            hits += (out.logits.argmax(-1).cpu() == labels).sum().item()
            seen += len(labels)
    return hits / seen


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab", type=int, default=200)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    torch.manual_seed(1234)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(args).to(device)
    model.print_trainable_parameters()
    train_loader = DataLoader(reviews(64, args.vocab, 16), batch_size=16, shuffle=True)
    valid_loader = DataLoader(reviews(32, args.vocab, 16), batch_size=16)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=args.lr)
    for epoch in range(args.epochs):
        model.train()
        for ids, mask, labels in train_loader:
            out = model(input_ids=ids.to(device), attention_mask=mask.to(device),
                        labels=labels.to(device))
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {out.loss.item():.4f} "
              f"accuracy {accuracy(model, valid_loader, device):.3f}")


if __name__ == "__main__":
    main()
