import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import nn


class HungarianMatcher(nn.Module):
    def __init__(self, cost_class=1.0, cost_bbox=5.0):
        super().__init__()
        self.cost_class = cost_class
        self.cost_bbox = cost_bbox

    @torch.no_grad()
    def forward(self, outputs, targets):
        indices = []
        for logits, boxes, target in zip(outputs["pred_logits"], outputs["pred_boxes"], targets):
            cost_class = -logits.softmax(-1)[:, target["labels"]]
            cost_bbox = torch.cdist(boxes, target["boxes"], p=1)
            cost = self.cost_class * cost_class + self.cost_bbox * cost_bbox
            row, col = linear_sum_assignment(cost)
            indices.append((torch.as_tensor(row), torch.as_tensor(col)))
        return indices


class TinyDETR(nn.Module):
    def __init__(self, num_classes=4, num_queries=6):
        super().__init__()
        self.queries = nn.Embedding(num_queries, 32)
        self.layer = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        self.class_embed = nn.Linear(32, num_classes + 1)
        self.bbox_embed = nn.Linear(32, 4)

    def forward(self, memory):
        hs = self.layer(self.queries.weight.expand(memory.size(0), -1, -1), memory)
        return {"pred_logits": self.class_embed(hs), "pred_boxes": self.bbox_embed(hs).sigmoid()}


def criterion(outputs, targets, indices, no_object=4):
    loss = 0
    for b, (src, tgt) in enumerate(indices):
        classes = torch.full((outputs["pred_logits"].size(1),), no_object, device=outputs["pred_logits"].device)
        classes[src] = targets[b]["labels"][tgt]
        loss = loss + F.cross_entropy(outputs["pred_logits"][b], classes)
        loss = loss + F.l1_loss(outputs["pred_boxes"][b][src], targets[b]["boxes"][tgt])
    return loss / len(indices)


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, matcher = TinyDETR().to(device), HungarianMatcher()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        memory = torch.randn(2, 10, 32, device=device)
        targets = [{"labels": torch.randint(0, 4, (3,), device=device), "boxes": torch.rand(3, 4, device=device)} for _ in range(2)]
        outputs = model(memory)
        loss = criterion(outputs, targets, matcher(outputs, targets))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())
