"""A tagger with several labels a row, validated by numpy and scikit-learn: thresholds, F1, AUC, a confusion matrix."""
import numpy as np
import torch
from sklearn.metrics import confusion_matrix, f1_score, precision_recall_curve, roc_auc_score
from torch import nn

torch.manual_seed(3)
TAGS = [f"tag-{n}" for n in range(20)]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.MultiheadAttention(width, 8, batch_first=True)
        self.wide = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        h = self.norm(x)
        x = x + self.mix(h, h, h, need_weights=False)[0]
        return x + self.wide(x)


net = nn.Sequential(nn.Embedding(8000, 512), *(Block(512) for _ in range(4)), nn.Linear(512, 20)).cuda()
opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
loss_fn = nn.BCEWithLogitsLoss()


def batch(rows):
    return torch.randint(0, 8000, (rows, 64), device="cuda"), (torch.rand(rows, 20, device="cuda") < 0.3).float()


for step in range(3):
    ids, tags = batch(32)
    loss = loss_fn(net(ids).mean(1), tags)
    opt.zero_grad()
    loss.backward()
    opt.step()

net.eval()
scores, truth = [], []
with torch.no_grad():
    for _ in range(3):
        ids, tags = batch(64)
        scores.append(net(ids).mean(1).sigmoid().cpu())
        truth.append(tags.cpu())
scores, truth = torch.cat(scores).numpy(), torch.cat(truth).numpy().astype(int)
if np.isnan(scores).any():
    raise ValueError("scores are not numbers")
thresholds = np.linspace(0.05, 0.95, 19)
macro = [f1_score(truth, scores > t, average="macro", zero_division=0) for t in thresholds]
threshold = thresholds[int(np.argmax(macro))]
per_tag = f1_score(truth, scores > threshold, average=None, zero_division=0)
weak = [TAGS[n] for n in np.flatnonzero(per_tag < np.median(per_tag))]
print(f"threshold {threshold:.2f}, macro F1 {max(macro):.3f}, weak: {', '.join(weak) or 'none'}")
print(f"AUC {roc_auc_score(truth, scores, average='macro'):.3f}")
precision, recall, cuts = precision_recall_curve(truth.ravel(), scores.ravel())
assert len(precision) == len(recall) == len(cuts) + 1
matrix = confusion_matrix(truth.argmax(1), scores.argmax(1), labels=range(20))
assert matrix.sum() == len(truth) == 192
top = np.argsort(-scores, axis=1)[:, :3]
print([[TAGS[n] for n in row] for row in top[:2].tolist()])
low, middle, high = np.percentile(scores[np.arange(len(scores)), truth.argmax(1)], [5, 50, 95])
assert low <= middle <= high
print(np.bincount(scores.argmax(1), minlength=20).tolist(), np.corrcoef(scores.T).shape)
np.savez("scores.npz", scores=scores, truth=truth)
assert np.load("scores.npz")["scores"].shape == (192, 20)
