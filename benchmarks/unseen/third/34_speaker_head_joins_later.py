"""Emotion recognition from speech; a speaker head joins after some warm-up steps."""
import torch
import torch.nn as nn
import torch.nn.functional as F

cfg = {
    "mels": 40, "frames": 60, "hidden": 32, "emotions": 5, "speakers": 12,
    "batch": 16, "steps": 8, "speaker_from": 4, "speaker_weight": 0.3,
    "lr": 1e-3, "speaker_lr": 5e-4, "seed": 8,
}


class Encoder(nn.Module):
    def __init__(self, mels, hidden):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(mels, hidden, 5, padding=2), nn.ReLU(),
            nn.Conv1d(hidden, hidden, 5, padding=2), nn.ReLU())

    def forward(self, mel):
        return self.net(mel).mean(dim=2)


class EmotionNet(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.encoder = Encoder(c["mels"], c["hidden"])
        self.emotion = nn.Linear(c["hidden"], c["emotions"])

    def forward(self, mel):
        h = self.encoder(mel)
        return self.emotion(h), h


def fake_batch(c):
    emotion = torch.randint(0, c["emotions"], (c["batch"],))
    speaker = torch.randint(0, c["speakers"], (c["batch"],))
    mel = torch.randn(c["batch"], c["mels"], c["frames"])
    mel[:, :5] += emotion.view(-1, 1, 1) * 0.5
    mel[:, 5:10] += speaker.view(-1, 1, 1) * 0.2
    return mel, emotion, speaker


def main(c):
    torch.manual_seed(c["seed"])
    model = EmotionNet(c).cuda()
    speaker_head = nn.Linear(c["hidden"], c["speakers"]).cuda()
    opt_model = torch.optim.Adam(model.parameters(), lr=c["lr"])
    opt_speaker = torch.optim.Adam(speaker_head.parameters(), lr=c["speaker_lr"])
    scaler = torch.amp.GradScaler("cuda")

    for step in range(c["steps"]):
        mel, emotion, speaker = (t.cuda() for t in fake_batch(c))
        opt_model.zero_grad()
        opt_speaker.zero_grad()
        with_speaker = step >= c["speaker_from"]
        with torch.autocast("cuda", dtype=torch.float16):
            logits, h = model(mel)
            loss = F.cross_entropy(logits, emotion)
            if with_speaker:
                loss = loss + c["speaker_weight"] * F.cross_entropy(speaker_head(h), speaker)
        scaler.scale(loss).backward()
        scaler.step(opt_model)
        scaler.step(opt_speaker)
        scaler.update()
        print(f"step {step:02d} loss {loss.item():.4f} speaker {with_speaker}")


if __name__ == "__main__":
    main(cfg)
