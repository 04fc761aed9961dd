"""Audio captioning: projected sound features take the places of <audio> tokens."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

AUDIO_TOKEN = 3
N_AUDIO = 6


class Captions(Dataset):
    def __init__(self, n=64, text_len=12, vocab=200, audio_dim=20):
        self.text = torch.randint(4, vocab, (n, text_len))
        self.audio = torch.randn(n, N_AUDIO, audio_dim)

    def __len__(self):
        return len(self.text)

    def __getitem__(self, i):
        prompt = torch.full((N_AUDIO,), AUDIO_TOKEN)
        ids = torch.cat([torch.tensor([1]), prompt, self.text[i]])
        labels = ids.clone()
        labels[:N_AUDIO + 1] = -100
        return ids, self.audio[i], labels


class AudioLM(nn.Module):
    def __init__(self, vocab=200, dim=48, audio_dim=20, depth=2, max_len=32):
        super().__init__()
        self.words = nn.Embedding(vocab, dim)
        self.places = nn.Embedding(max_len, dim)
        self.projector = nn.Sequential(nn.Linear(audio_dim, dim), nn.GELU(), nn.Linear(dim, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab)

    def merge(self, ids, audio):
        embeds = self.words(ids)
        sound = self.projector(audio)
        embeds[ids == AUDIO_TOKEN] = sound.flatten(0, 1)
        return embeds

    def forward(self, ids, audio):
        x = self.merge(ids, audio)
        x = x + self.places(torch.arange(ids.size(1), device=ids.device))
        causal = nn.Transformer.generate_square_subsequent_mask(ids.size(1), device=ids.device)
        return self.head(self.decoder(x, mask=causal, is_causal=True))


def train(epochs=1, lr=1e-3):
    torch.manual_seed(99)
    device = torch.device("cuda")
    model = AudioLM().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cuda")
    loader = DataLoader(Captions(), batch_size=8, shuffle=True)
    for epoch in range(epochs):
        for step, (ids, audio, labels) in enumerate(loader):
            ids, audio, labels = ids.to(device), audio.to(device), labels.to(device)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device_type="cuda", dtype=torch.float16):
                logits = model(ids, audio)
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(),
                                       ignore_index=-100)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            print(f"{epoch}:{step} loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
