"""Lightning with torchvision's ConvNeXt: bf16-mixed, gradients of two batches, averaged weights (SWA), metrics on the GPU."""
import json
import logging

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import torchvision
from pytorch_lightning.callbacks import StochasticWeightAveraging
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

BATCH, SIZE, CLASSES, EPOCHS, ROWS = 64, 224, 200, 3, 256


class Pictures(Dataset):
    def __init__(self, count, first):
        self.count, self.first = count, first

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        draw = torch.Generator().manual_seed(self.first + i)
        label = i % CLASSES
        return torch.rand(3, SIZE, SIZE, generator=draw) * (0.5 + label / CLASSES), label


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torchvision.models.convnext_base(weights=None, num_classes=CLASSES, stochastic_depth_prob=0.2)
        self.top1 = MulticlassAccuracy(CLASSES, average="micro")
        self.confusion = MulticlassConfusionMatrix(CLASSES)

    def training_step(self, batch, index):
        pictures, labels = batch
        if index % 2:
            pictures = pictures.flip(-1)
        loss = F.cross_entropy(self.net(pictures), labels, label_smoothing=0.1)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        pictures, labels = batch
        logits = self.net(pictures)
        self.top1(logits, labels)
        self.confusion.update(logits, labels)
        self.log("top1", self.top1, on_epoch=True)

    def on_validation_epoch_end(self):
        print("hits on the diagonal", self.confusion.compute().diagonal().sum().item())
        self.confusion.reset()

    def configure_optimizers(self):
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}], lr=4e-4)


logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
pl.seed_everything(12)
trainer = pl.Trainer(
    max_epochs=EPOCHS,
    accelerator="gpu",
    devices=1,
    precision="bf16-mixed",
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    callbacks=[StochasticWeightAveraging(swa_lrs=1e-4, swa_epoch_start=1, annealing_epochs=1, device=None)],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(), DataLoader(Pictures(ROWS, 0), BATCH, shuffle=True), DataLoader(Pictures(96, 10**6), 96))
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
