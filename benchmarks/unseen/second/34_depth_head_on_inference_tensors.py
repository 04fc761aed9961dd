import torch
import torch.nn.functional as F
from torch import nn
from transformers import Dinov2Config, Dinov2Model


class Depther(nn.Module):
    def __init__(self, patch=8, size=32):
        super().__init__()
        config = Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, mlp_ratio=2,
                              image_size=size, patch_size=patch)
        self.backbone = Dinov2Model(config).eval().requires_grad_(False)
        self.grid = size // patch
        self.decode_head = nn.Sequential(nn.Conv2d(32, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 1))

    @torch.inference_mode()
    def extract_feat(self, images):
        tokens = self.backbone(pixel_values=images).last_hidden_state[:, 1:]
        return tokens.transpose(1, 2).reshape(len(images), -1, self.grid, self.grid)

    def forward(self, images):
        depth = self.decode_head(self.extract_feat(images))
        return F.interpolate(depth, size=images.shape[-2:], mode="bilinear")

    def forward_train(self, images, depth_gt):
        return {"loss_l1": F.l1_loss(self.forward(images), depth_gt)}


def main():
    device = "cuda"
    torch.manual_seed(0)
    model = Depther().to(device)
    optimizer = torch.optim.AdamW(model.decode_head.parameters(), lr=1e-3)
    for it in range(4):
        images = torch.randn(2, 3, 32, 32, device=device)
        depth_gt = images.mean(1, keepdim=True).abs()
        losses = model.forward_train(images, depth_gt)
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(it, {k: round(v.item(), 4) for k, v in losses.items()})


if __name__ == "__main__":
    main()
