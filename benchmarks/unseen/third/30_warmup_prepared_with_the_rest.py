"""Forecast hourly load with a GRU, several GPUs through accelerate."""
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

HPARAMS = {"window": 24, "horizon": 4, "hidden": 32, "lr": 3e-3,
           "batch_size": 16, "epochs": 2, "warmup": 0.2, "seed": 11}


class LoadForecaster(nn.Module):
    def __init__(self, hidden, horizon):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, horizon)

    def forward(self, history):
        states, _ = self.rnn(history)
        return self.head(states[:, -1])


def windows(hp, n=160):
    hours = torch.arange(n + hp["window"] + hp["horizon"]).float()
    load = torch.sin(hours * 2 * torch.pi / 24) + 0.1 * torch.randn_like(hours)
    size = hp["window"] + hp["horizon"]
    chunks = torch.stack([load[i:i + size] for i in range(n)])
    return TensorDataset(chunks[:, :hp["window"]].unsqueeze(-1), chunks[:, hp["window"]:])


def warmup_then_linear(optimizer, warmup_steps, total_steps):
    def factor(step):
        if step < warmup_steps:
            return step / max(1, warmup_steps)
        return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))
    return LambdaLR(optimizer, factor)


def main(hp):
    set_seed(hp["seed"])
    accelerator = Accelerator()
    loader = DataLoader(windows(hp), batch_size=hp["batch_size"], shuffle=True)
    model = LoadForecaster(hp["hidden"], hp["horizon"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=hp["lr"])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    total_steps = hp["epochs"] * len(loader)
    scheduler = warmup_then_linear(optimizer, int(hp["warmup"] * total_steps), total_steps)
    scheduler = accelerator.prepare(scheduler)
    criterion = nn.MSELoss()

    for epoch in range(hp["epochs"]):
        model.train()
        for history, future in loader:
            loss = criterion(model(history), future)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        mean_loss = accelerator.reduce(loss.detach(), reduction="mean").item()
        accelerator.print(f"epoch {epoch} loss {mean_loss:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main(HPARAMS)
