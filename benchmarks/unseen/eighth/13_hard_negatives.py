# SSD-style detector, multibox loss with hard negative mining (3 negatives per positive)
import torch
import torch.nn as nn
import torch.nn.functional as F


def conv(i, o, stride=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class SSD(nn.Module):
    def __init__(self, classes=81, boxes=6):
        super().__init__()
        self.classes = classes
        self.stem = nn.Sequential(conv(3, 64, 2), conv(64, 128), conv(128, 256, 2), conv(256, 512, 2))
        self.stages = nn.ModuleList([conv(512, 512), conv(512, 1024, 2), conv(1024, 512, 2), conv(512, 256, 2)])
        widths = [512, 1024, 512, 256]
        self.cls = nn.ModuleList(nn.Conv2d(w, boxes * classes, 3, padding=1) for w in widths)
        self.loc = nn.ModuleList(nn.Conv2d(w, boxes * 4, 3, padding=1) for w in widths)

    def forward(self, x):
        x = self.stem(x)
        scores, places = [], []
        for stage, c, l in zip(self.stages, self.cls, self.loc):
            x = stage(x)
            scores.append(c(x).permute(0, 2, 3, 1).reshape(len(x), -1, self.classes))
            places.append(l(x).permute(0, 2, 3, 1).reshape(len(x), -1, 4))
        return torch.cat(scores, 1), torch.cat(places, 1)


def multibox_loss(scores, places, labels, targets, ratio=3):
    positive = labels > 0
    n = positive.sum()
    if n == 0:
        return scores.sum() * 0
    place_loss = F.smooth_l1_loss(places[positive], targets[positive], reduction="sum")
    with torch.no_grad():
        background = -F.log_softmax(scores, dim=-1)[..., 0]
        background[positive] = -float("inf")
        order = background.argsort(dim=1, descending=True).argsort(dim=1)
        negative = order < ratio * positive.sum(dim=1, keepdim=True)
    chosen = positive | negative
    class_loss = F.cross_entropy(scores[chosen], labels[chosen], reduction="sum")
    return (place_loss + class_loss) / n


net = SSD().cuda()
opt = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)
for it in range(3):
    images = torch.randn(16, 3, 512, 512, device="cuda")
    scores, places = net(images)
    labels = torch.zeros(scores.shape[:2], dtype=torch.long, device="cuda")
    labels[:, ::97] = 1 + torch.randint(0, 80, labels[:, ::97].shape, device="cuda")
    loss = multibox_loss(scores, places, labels, torch.randn_like(places))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 1 == 0:
        print("iter", it, "loss", loss.item())
net.eval()
with torch.no_grad():
    scores, places = net(torch.randn(1, 3, 512, 512, device="cuda"))
    best, cls = scores.softmax(-1)[0, :, 1:].max(-1)
    keep = best > 0.5
    print("kept", int(keep.sum()), "of", len(keep), places[0][keep].shape)
torch.save(net.state_dict(), "ssd.pth")
