"""Torchvision's Mask R-CNN (v2) on drawn boxes: pictures of several sizes, fp32, SGD with warm-up, then a look at held-out ones."""
import json

import torch
import torchvision

CLASSES, STEPS, SIZES = 21, 4, [(600, 800), (480, 640), (768, 1024), (500, 375)]
BATCH, OBJECTS, SHORT, LONG = 4, 9, 800, 1333

torch.manual_seed(5)
model = torchvision.models.detection.maskrcnn_resnet50_fpn_v2(
    weights=None, weights_backbone=None, num_classes=CLASSES, min_size=SHORT, max_size=LONG, box_detections_per_img=40
)
model.cuda()
params = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(params, lr=2e-3, momentum=0.9, weight_decay=1e-4)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=STEPS)
draw = torch.Generator().manual_seed(5)


def picture(number):
    """A noisy picture with rectangles on it, their boxes, classes and masks."""
    high, wide = SIZES[number % len(SIZES)]
    image = 0.1 * torch.rand(3, high, wide, generator=draw)
    count = int(torch.randint(2, OBJECTS, (1,), generator=draw))
    boxes, masks = torch.zeros(count, 4), torch.zeros(count, high, wide, dtype=torch.uint8)
    labels = torch.randint(1, CLASSES, (count,), generator=draw)
    for k in range(count):
        left = int(torch.randint(0, wide - 120, (1,), generator=draw))
        top = int(torch.randint(0, high - 120, (1,), generator=draw))
        right, bottom = left + 40 + 8 * k, top + 110 - 8 * k
        boxes[k] = torch.tensor([left, top, right, bottom])
        masks[k, top:bottom, left:right] = 1
        image[:, top:bottom, left:right] = labels[k] / CLASSES
    return image, {"boxes": boxes, "labels": labels, "masks": masks}


model.train()
for step in range(STEPS):
    images, targets = zip(*[picture(step * BATCH + k + step) for k in range(BATCH)])
    images = [image.cuda(non_blocking=True) for image in images]
    targets = [{key: value.cuda() for key, value in target.items()} for target in targets]
    losses = model(images, targets)
    loss = sum(losses.values())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(params, 5.0)
    optimizer.step()
    warm_up.step()
    print(step, {name: round(value.item(), 3) for name, value in losses.items()})

model.eval()
with torch.no_grad():
    for number in range(2):
        found = model([picture(number)[0].cuda()])[0]
        print(number, {name: tuple(value.shape) for name, value in found.items()})
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
