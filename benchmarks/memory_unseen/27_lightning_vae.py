"""A convolutional VAE in Lightning, 16-mixed, with a validation loop and gradient clipping."""
import json
import logging

import pytorch_lightning as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

SIZE, WIDTH, LATENT, BATCH = 128, 64, 256, 64


class VAE(pl.LightningModule):
    def __init__(self):
        super().__init__()
        w, side = WIDTH, SIZE // 16
        self.encoder = nn.Sequential(
            nn.Conv2d(3, w, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(w, 2 * w, 4, 2, 1), nn.BatchNorm2d(2 * w),
            nn.LeakyReLU(0.2), nn.Conv2d(2 * w, 4 * w, 4, 2, 1), nn.BatchNorm2d(4 * w), nn.LeakyReLU(0.2),
            nn.Conv2d(4 * w, 8 * w, 4, 2, 1), nn.BatchNorm2d(8 * w), nn.LeakyReLU(0.2), nn.Flatten())
        self.moments = nn.Linear(8 * w * side * side, 2 * LATENT)
        self.expand = nn.Linear(LATENT, 8 * w * side * side)
        self.decoder = nn.Sequential(
            nn.Unflatten(1, (8 * w, side, side)), nn.ConvTranspose2d(8 * w, 4 * w, 4, 2, 1), nn.BatchNorm2d(4 * w),
            nn.ReLU(), nn.ConvTranspose2d(4 * w, 2 * w, 4, 2, 1), nn.BatchNorm2d(2 * w), nn.ReLU(),
            nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(2 * w, w, 3, padding=1), nn.ReLU(),
            nn.ConvTranspose2d(w, 3, 4, 2, 1), nn.Sigmoid())

    def loss(self, x):
        mu, logvar = self.moments(self.encoder(x)).chunk(2, dim=1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
        return F.mse_loss(self.decoder(self.expand(z)), x) + 1e-4 * kl

    def training_step(self, batch, index):
        loss = self.loss(batch[0])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val", self.loss(batch[0]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
rows = TensorDataset(torch.rand(4 * BATCH, 3, SIZE, SIZE))
trainer = pl.Trainer(max_epochs=1, accelerator="gpu", devices=1, precision="16-mixed", gradient_clip_val=1.0,
                     logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(VAE(), DataLoader(rows, BATCH, shuffle=True), DataLoader(rows, 2 * BATCH))
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
