"""A classifier from a checkpoint: the best epoch by accuracy is kept, the rate is cut on a plateau, patience ends it."""
import tempfile

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForSequenceClassification, BertConfig

torch.manual_seed(1)
folder = tempfile.mkdtemp()
BertConfig(hidden_size=1024, num_hidden_layers=12, num_attention_heads=16, intermediate_size=4096, num_labels=6,
           architectures=["BertForSequenceClassification"]).save_pretrained(folder)
model = AutoModelForSequenceClassification.from_pretrained(folder, device_map="auto")
rows = TensorDataset(torch.randint(0, 30522, (96, 128)), torch.randint(0, 6, (96,)))
train = DataLoader(torch.utils.data.Subset(rows, range(32)), batch_size=16, shuffle=True)
valid = DataLoader(torch.utils.data.Subset(rows, range(32, 96)), batch_size=32)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
plan = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", factor=0.5, patience=0)
best, since = 0.0, 0
for epoch in range(4):
    model.train()
    for ids, labels in train:
        out = model(input_ids=ids.to(model.device), labels=labels.to(model.device))
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    right, losses = 0, []
    with torch.no_grad():
        for ids, labels in valid:
            ids, labels = ids.to(model.device), labels.to(model.device)
            out = model(input_ids=ids, labels=labels)
            right += (out.logits.argmax(-1) == labels).sum().item()
            losses.append(out.loss.item())
    accuracy = right / len(valid.dataset)
    plan.step(sum(losses) / len(losses))
    print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}, accuracy {accuracy:.3f}, rate {plan.get_last_lr()[0]:.1e}")
    if accuracy > best:
        best, since = accuracy, 0
        torch.save({"model": model.state_dict(), "epoch": epoch, "accuracy": best}, "best.pt")
    else:
        since += 1
        if since >= 2:
            print("no better for two epochs")
            break
kept = torch.load("best.pt", map_location="cpu")
model.load_state_dict(kept["model"])
print(f"went back to epoch {kept['epoch']} with {kept['accuracy']:.3f}")
