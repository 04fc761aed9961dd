import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.cls_head = nn.Conv2d(8, 3, 1)
        self.box_head = nn.Conv2d(8, 4, 1)

    def forward(self, images):
        f = self.backbone(images)
        return self.cls_head(f), self.box_head(f)

    def freeze_backbone(self, frozen=True):
        for p in self.backbone.parameters():
            p.requires_grad_(not frozen)


def train(args):
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(0)
    detector = Detector().cuda()
    detector.freeze_backbone()
    model = DDP(detector, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    data = TensorDataset(torch.randn(32, 3, 8, 8), torch.randint(0, 3, (32, 8, 8)), torch.rand(32, 4, 8, 8))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        if epoch == args.unfreeze_at:
            detector.freeze_backbone(False)
        for images, classes, boxes in loader:
            logits, deltas = model(images.cuda())
            loss = F.cross_entropy(logits, classes.cuda()) + F.smooth_l1_loss(deltas, boxes.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if local_rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--unfreeze-at", type=int, default=1)
    train(parser.parse_args())
