import torch
from torch import nn


class LinearClassifier(nn.Module):
    def __init__(self, backbone, features, classes, freeze_model):
        super().__init__()
        self.backbone, self.freeze_model = backbone, freeze_model
        self.head = nn.Linear(features, classes)

    def forward(self, images):
        if self.freeze_model:
            with torch.no_grad():
                features = self.backbone(images).flatten(1)
        else:
            features = self.backbone(images).flatten(1)
        return self.head(features)

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)


backbone = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU())
model = LinearClassifier(backbone, 36, 3, freeze_model=False).cuda()
optimizer = model.configure_optimizers()
for _ in range(4):
    images, labels = torch.rand(6, 1, 8, 8).cuda(), torch.randint(0, 3, (6,)).cuda()
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
