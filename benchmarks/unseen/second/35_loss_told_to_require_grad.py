import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MojiModel(nn.Module):
    def __init__(self, nb_tokens, nb_classes, return_tensor=True):
        super().__init__()
        self.return_tensor = return_tensor
        self.embed = nn.Embedding(nb_tokens, 32)
        self.lstm = nn.LSTM(32, 32, batch_first=True, bidirectional=True)
        self.attention = nn.Linear(64, 1)
        self.output_layer = nn.Linear(64, nb_classes)

    def forward(self, tokens):
        seq, _ = self.lstm(torch.tanh(self.embed(tokens)))
        weights = self.attention(seq).softmax(dim=1)
        outputs = self.output_layer((weights * seq).sum(1))
        if self.return_tensor:
            outputs = outputs.data
        return outputs


def calculate_loss(criterion, model, tokens, labels):
    loss = criterion(model(tokens), labels)
    loss.requires_grad_(True)
    return loss


def finetune(model, loader, device, epochs=3, lr=1e-3):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for tokens, labels in loader:
            optimizer.zero_grad()
            loss = calculate_loss(criterion, model, tokens.to(device), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"{epoch + 1} Epoch loss {total / len(loader):.5f}")


if __name__ == "__main__":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = torch.randint(0, 80, (64, 12))
    data = TensorDataset(tokens, (tokens[:, 0] > 40).long())
    finetune(MojiModel(80, 2).to(device), DataLoader(data, batch_size=16), device)
