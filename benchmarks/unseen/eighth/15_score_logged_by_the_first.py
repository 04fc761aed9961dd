"""Two GPUs by Lightning (it starts the second process itself). python 15_score_logged_by_the_first.py [everywhere]"""
import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EVERYWHERE = "everywhere" in sys.argv


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
        self.hits, self.seen = 0, 0

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_validation_epoch_start(self):
        self.hits, self.seen = 0, 0

    def validation_step(self, batch, _):
        x, y = batch
        logits = self.net(x)
        self.log("val/loss", nn.functional.cross_entropy(logits, y), sync_dist=True)
        self.hits += (logits.argmax(-1) == y).sum().item()
        self.seen += len(y)

    def on_validation_epoch_end(self):
        score = torch.tensor(self.hits / max(1, self.seen), device=self.device)
        if EVERYWHERE or self.trainer.is_global_zero:
            self.log("val/accuracy", score, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def rows(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long() + 2 * (x[:, 0] > 0).long())


def main():
    pl.seed_everything(0, workers=True)
    trainer = pl.Trainer(accelerator="gpu", devices=2, strategy="ddp", max_epochs=2, num_sanity_val_steps=0,
                         enable_checkpointing=False, logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Classifier(), DataLoader(rows(64, 0), batch_size=8, shuffle=True), DataLoader(rows(32, 1), batch_size=8))
    print("finished", trainer.global_step)


if __name__ == "__main__":
    main()
