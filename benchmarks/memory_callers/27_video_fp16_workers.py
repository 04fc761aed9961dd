"""Video classification: tubelets by a 3D convolution, attention over space then time, fp16 with a GradScaler, accumulation."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

DIM, DEPTH, HEADS, CLASSES = 768, 12, 12, 400
BATCH, FRAMES, SIZE, ACCUMULATE, CLIPS = 12, 16, 224, 2, 72


class Clips(Dataset):
    def __len__(self):
        return CLIPS

    def __getitem__(self, i):
        draw = torch.Generator().manual_seed(i)
        return torch.randint(0, 256, (3, FRAMES, SIZE, SIZE), generator=draw, dtype=torch.uint8), i % CLASSES


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        n, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(n, t, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * (DIM // HEADS) ** -0.5).softmax(-1)
        return self.proj((weights.to(v.dtype) @ v).transpose(1, 2).reshape(n, t, DIM))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.space = Attention(), Attention()
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        b, t, s, d = x.shape
        y = x.transpose(1, 2).reshape(b * s, t, d)
        x = x + self.time(y).view(b, s, t, d).transpose(1, 2)
        x = x + self.space(x.reshape(b * t, s, d)).view(b, t, s, d)
        return x + self.mlp(x)


class Video(nn.Module):
    def __init__(self):
        super().__init__()
        self.tubes = nn.Conv3d(3, DIM, (2, 16, 16), (2, 16, 16))
        self.places = nn.Parameter(torch.zeros(1, FRAMES // 2, (SIZE // 16) ** 2, DIM))
        self.blocks = nn.Sequential(*[Block() for _ in range(DEPTH)])
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

    def forward(self, clips):
        x = self.tubes(clips).flatten(3).permute(0, 2, 3, 1) + self.places
        return self.head(self.norm(self.blocks(x)).mean((1, 2)))


if __name__ == "__main__":
    torch.manual_seed(12)
    model = Video().to("cuda")
    seen = []
    model.places.register_hook(lambda grad: seen.append(grad.detach().float().norm()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, amsgrad=True, foreach=False)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)
    loader = DataLoader(Clips(), batch_size=BATCH, num_workers=2, pin_memory=True, drop_last=True, prefetch_factor=1)
    mean = torch.tensor([0.45, 0.45, 0.45], device="cuda").view(1, 3, 1, 1, 1)
    for number, (clips, labels) in enumerate(loader):
        clips = clips.to("cuda", non_blocking=True).float().div_(255).sub_(mean).div_(0.225)
        labels = labels.to("cuda", non_blocking=True)
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(clips), labels, label_smoothing=0.1)
        scaler.scale(loss / ACCUMULATE).backward()
        if (number + 1) % ACCUMULATE == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        print(number, loss.item(), seen[-1].item())
    print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                      "max_memory_reserved": torch.cuda.max_memory_reserved()}))
