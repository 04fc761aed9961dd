import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class ShapesDataset(Dataset):
    def __init__(self, n=32):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(0, 256, (n, 16, 16, 3), generator=generator, dtype=torch.uint8)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = self.images[i]
        return {"image": image, "label": int(image.float().mean() > 127.5)}


class Collator:
    def __init__(self, mean=0.5, std=0.25):
        self.mean, self.std = mean, std

    def __call__(self, features):
        images = torch.stack([f["image"] for f in features]).permute(0, 3, 1, 2).float() / 255
        labels = torch.tensor([f["label"] for f in features])
        return {"pixel_values": (images - self.mean) / self.std, "labels": labels}


class ShapeNet(nn.Module):
    def __init__(self, classes=2):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, stride=2)
        self.fc = nn.Linear(16, classes)

    def forward(self, pixel_values, labels=None):
        logits = self.fc(F.relu(self.conv(pixel_values)).mean((2, 3)))
        loss = F.cross_entropy(logits, labels) if labels is not None else None
        return {"loss": loss, "logits": logits}


def main():
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=6,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            logging_steps=2,
            save_strategy="no",
            report_to="none",
        )
        trainer = Trainer(model=ShapeNet(), args=args, train_dataset=ShapesDataset(), data_collator=Collator())
        trainer.train()


if __name__ == "__main__":
    main()
