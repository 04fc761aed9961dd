"""Student net for a tabular competition, trained on the logits of an ensemble."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

settings = {"features": 24, "classes": 8, "rows": 256, "batch": 64,
            "epochs": 2, "lr": 2e-3, "temperature": 4.0, "alpha": 0.8}


class DistillRows(Dataset):
    """Rows, hard labels and the out-of-fold logits that the ensemble gave them."""

    def __init__(self, s):
        g = torch.Generator().manual_seed(77)
        centres = torch.randn(s["classes"], s["features"], generator=g)
        self.y = torch.randint(0, s["classes"], (s["rows"],), generator=g)
        self.x = centres[self.y] + torch.randn(s["rows"], s["features"], generator=g)
        self.logits = -torch.cdist(self.x, centres)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i], self.logits[i]


class Student(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_in, 48), nn.SiLU(), nn.Linear(48, n_out))

    def forward(self, x):
        return self.net(x)


class DistillLoss(nn.Module):
    def __init__(self, temperature, alpha):
        super().__init__()
        self.t, self.alpha = temperature, alpha
        self.kl = nn.KLDivLoss(reduction="batchmean")
        self.ce = nn.CrossEntropyLoss()

    def forward(self, student_logits, teacher_logits, labels):
        student_prob = F.softmax(student_logits / self.t, dim=1)
        teacher_prob = F.softmax(teacher_logits / self.t, dim=1)
        soft = self.kl(student_prob, teacher_prob) * self.t ** 2
        return self.alpha * soft + (1 - self.alpha) * self.ce(student_logits, labels)


def main(s):
    torch.manual_seed(0)
    loader = DataLoader(DistillRows(s), batch_size=s["batch"], shuffle=True)
    student = Student(s["features"], s["classes"]).to(device)
    criterion = DistillLoss(s["temperature"], s["alpha"])
    optimizer = torch.optim.AdamW(student.parameters(), lr=s["lr"])
    for epoch in range(s["epochs"]):
        student.train()
        hits, total = 0, 0.0
        for x, y, teacher_logits in loader:
            x, y, teacher_logits = x.to(device), y.to(device), teacher_logits.to(device)
            logits = student(x)
            loss = criterion(logits, teacher_logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hits += (logits.argmax(1) == y).sum().item()
            total += loss.item()
        print(f"epoch {epoch} loss {total / len(loader):.4f} acc {hits / s['rows']:.3f}")


if __name__ == "__main__":
    main(settings)
