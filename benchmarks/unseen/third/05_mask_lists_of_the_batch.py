"""Fine-tunes a mask classification head (fixed queries) on a toy panoptic set."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_CLASSES, QUERIES, SIZE = 4, 5, 32


class ToyPanoptic(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        n = int(torch.randint(1, QUERIES, (1,), generator=g))
        masks = torch.zeros(n, SIZE, SIZE)
        for j in range(n):
            x, y = torch.randint(0, SIZE - 8, (2,), generator=g).tolist()
            masks[j, y : y + 8, x : x + 8] = 1.0
        image = masks.sum(0).clamp(max=1).expand(3, -1, -1) + 0.1 * torch.randn(3, SIZE, SIZE, generator=g)
        return image, masks, torch.randint(0, NUM_CLASSES, (n,), generator=g)


def collate_fn(items):
    return {
        "pixel_values": torch.stack([i[0] for i in items]),
        "mask_labels": [i[1] for i in items],
        "class_labels": [i[2] for i in items],
    }


def move(batch):
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


class MaskNet(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, dim, 3, padding=1), nn.ReLU(), nn.Conv2d(dim, dim, 3, padding=1))
        self.queries = nn.Parameter(torch.randn(QUERIES, dim) * 0.1)
        self.classifier = nn.Linear(dim, NUM_CLASSES + 1)

    def forward(self, pixel_values):
        feats = self.backbone(pixel_values)
        masks = torch.einsum("qd,bdhw->bqhw", self.queries, feats)
        attn = masks.flatten(2).softmax(-1)
        pooled = torch.einsum("bqn,bdn->bqd", attn, feats.flatten(2))
        return self.classifier(pooled), masks


def criterion(class_logits, mask_logits, mask_labels, class_labels):
    loss = 0.0
    for logits, masks, gt_masks, gt_classes in zip(class_logits, mask_logits, mask_labels, class_labels):
        n = gt_masks.shape[0]
        loss = loss + F.binary_cross_entropy_with_logits(masks[:n], gt_masks)
        wanted = torch.full((QUERIES,), NUM_CLASSES, dtype=torch.long, device=logits.device)
        wanted[:n] = gt_classes
        loss = loss + F.cross_entropy(logits, wanted)
    return loss / len(mask_labels)


def main():
    torch.manual_seed(0)
    loader = DataLoader(ToyPanoptic(), batch_size=4, shuffle=True, collate_fn=collate_fn)
    model = MaskNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        for batch in loader:
            batch = move(batch)
            optimizer.zero_grad()
            class_logits, mask_logits = model(batch["pixel_values"])
            loss = criterion(class_logits, mask_logits, batch["mask_labels"], batch["class_labels"])
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
