"""Serving by hand: keys and values of all requests in pages of one pool; who has to wait is swapped to pinned host memory."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

DIM, LAYERS, HEADS, KV, WIDE, VOCAB = 2560, 28, 20, 4, 8192, 64000
PAGE, PAGES, SEATS, REQUESTS, NEW = 64, 400, 8, 20, 24
PROMPTS = (2900, 700, 1800, 4100, 300)
SIZE = DIM // HEADS


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, (HEADS + 2 * KV) * SIZE, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 2 * WIDE, bias=False), nn.Linear(WIDE, DIM, bias=False)

    def heads(self, x):
        b, t, _ = x.shape
        return self.qkv(self.n1(x)).view(b, t, HEADS + 2 * KV, SIZE).transpose(1, 2).split([HEADS, KV, KV], 1)

    def rest(self, x, y):
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        gate, up = self.up(self.n2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Request:
    def __init__(self, number):
        draw = torch.Generator().manual_seed(number)
        self.ids = torch.randint(0, VOCAB, (1, PROMPTS[number % len(PROMPTS)]), generator=draw).cuda()
        self.length, self.pages, self.host, self.left = 0, [], None, NEW - number % 3 * 4


torch.manual_seed(2)
with torch.device("cuda"), torch.inference_mode():
    words, norm, head = nn.Embedding(VOCAB, DIM).bfloat16(), nn.RMSNorm(DIM).bfloat16(), nn.Linear(DIM, VOCAB, bias=False).bfloat16()
    blocks = nn.ModuleList(Block().bfloat16() for _ in range(LAYERS))
    pool = torch.zeros(LAYERS, 2, PAGES, KV, PAGE, SIZE, dtype=torch.bfloat16)
free = list(range(PAGES))


def prefill(request):
    x, t = words(request.ids), request.ids.shape[1]
    for _ in range(-(-(t + NEW) // PAGE)):
        request.pages.append(free.pop())
    place = torch.tensor(request.pages[: -(-t // PAGE)], device="cuda")
    for layer, block in enumerate(blocks):
        q, k, v = block.heads(x)
        for side, y in enumerate((k, v)):
            padded = F.pad(y[0], (0, 0, 0, -t % PAGE)).view(KV, -1, PAGE, SIZE)
            pool[layer, side, place] = padded.transpose(0, 1)
        k, v = (y.repeat_interleave(HEADS // KV, 1) for y in (k, v))
        x = block.rest(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    request.length, request.next = t, head(norm(x[:, -1])).argmax(-1)


def decode(batch):
    longest = max(len(r.pages) for r in batch)
    table = torch.tensor([r.pages + [0] * (longest - len(r.pages)) for r in batch], device="cuda")
    at = torch.tensor([r.length for r in batch], device="cuda")
    seen = (torch.arange(longest * PAGE, device="cuda") <= at[:, None])[:, None, None]
    page, slot = table.gather(1, (at // PAGE)[:, None])[:, 0], at % PAGE
    x = words(torch.stack([r.next for r in batch]))
    for layer, block in enumerate(blocks):
        q, k, v = block.heads(x)
        pool[layer, 0, page, :, slot] = k[:, :, 0]
        pool[layer, 1, page, :, slot] = v[:, :, 0]
        k, v = (pool[layer, side][table].transpose(1, 2).flatten(2, 3).repeat_interleave(HEADS // KV, 1) for side in (0, 1))
        x = block.rest(x, F.scaled_dot_product_attention(q, k, v, attn_mask=seen))
    chosen = head(norm(x[:, -1])).argmax(-1)
    for row, r in enumerate(batch):
        r.next, r.length, r.left = chosen[row : row + 1], r.length + 1, r.left - 1


with torch.inference_mode():
    waiting, running, swapped, turn = [Request(n) for n in range(REQUESTS)], [], [], 0
    while waiting or running or swapped:
        while len(running) < SEATS and swapped and len(free) >= len(swapped[0].pages):
            request = swapped.pop(0)
            request.pages = [free.pop() for _ in request.pages]
            pool[:, :, request.pages] = request.host.cuda(non_blocking=True)
            request.host = None
            running.append(request)
        while len(running) < SEATS and waiting and len(free) * PAGE >= waiting[0].ids.shape[1] + NEW + PAGE:
            prefill(waiting[0])
            running.append(waiting.pop(0))
        decode(running)
        for request in [r for r in running if r.left <= 0]:
            free.extend(request.pages)
            running.remove(request)
        turn += 1
        if turn % 5 == 0 and len(running) > 1 and (waiting or swapped):
            request = running.pop(0)
            kept = pool[:, :, request.pages]
            request.host = torch.empty(kept.shape, dtype=kept.dtype, pin_memory=True).copy_(kept, non_blocking=True)
            torch.cuda.synchronize()
            free.extend(request.pages)
            swapped.append(request)
    print(turn, "turns", len(free), "pages free")
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
