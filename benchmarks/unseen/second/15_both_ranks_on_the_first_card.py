import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

cfg = {"device": "cuda", "epochs": 2, "batch_size": 8, "lr": 0.01, "seed": 1024}


class TextVideo(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.video = nn.Linear(32, dim)
        self.text = nn.Embedding(12, dim)

    def forward(self, video, label):
        v = F.normalize(self.video(video), dim=-1)
        t = F.normalize(self.text(label), dim=-1)
        return v @ t.t() / 0.07


def build(cfg):
    generator = torch.Generator().manual_seed(cfg["seed"])
    data = TensorDataset(torch.randn(64, 32, generator=generator), torch.randint(0, 12, (64,), generator=generator))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=cfg["batch_size"], sampler=sampler, drop_last=True)
    model = DistributedDataParallel(TextVideo().to(cfg["device"]))
    return model, loader, sampler


def main():
    dist.init_process_group(backend="nccl")
    torch.manual_seed(cfg["seed"])
    model, loader, sampler = build(cfg)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg["lr"])
    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        for video, label in loader:
            video, label = video.to(cfg["device"]), label.to(cfg["device"])
            logits = model(video, label)
            truth = torch.arange(len(logits), device=logits.device)
            loss = (F.cross_entropy(logits, truth) + F.cross_entropy(logits.t(), truth)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(epoch, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
