# GPT2-XL sized LM with Lightning on a single L4. bf16-true so it fits.
import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset


class Tokens(Dataset):
    def __init__(self, n, block=512):
        self.data = torch.randint(50257, (n, block + 1), generator=torch.Generator().manual_seed(n))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return self.data[i, :-1], self.data[i, 1:]


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(y)
        return x + self.mlp(self.ln2(x))


class LitGPT(L.LightningModule):
    def __init__(self, d=1600, layers=48, heads=25):
        super().__init__()
        self.save_hyperparameters()
        self.wte, self.wpe = nn.Embedding(50257, d), nn.Embedding(1024, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(d)
        self.head = nn.Linear(d, 50257, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1), device=self.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))

    def step(self, batch):
        ids, targets = batch
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch), prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=3e-4, weight_decay=0.1)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=self.trainer.estimated_stepping_batches)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


if __name__ == "__main__":
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-true",
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        val_check_interval=4,
        limit_val_batches=2,
        log_every_n_steps=1,
        num_sanity_val_steps=1,
        callbacks=[ModelCheckpoint(dirpath="ckpt", every_n_train_steps=2, save_last=True)],
        enable_progress_bar=False,
        logger=False,
    )
    model = LitGPT()
    trainer.fit(model, DataLoader(Tokens(32), batch_size=4, shuffle=True), DataLoader(Tokens(16), batch_size=4))
    trainer.validate(model, DataLoader(Tokens(16), batch_size=4), ckpt_path="ckpt/last.ckpt", weights_only=False)
