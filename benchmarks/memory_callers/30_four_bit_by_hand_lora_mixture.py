"""A frozen Llama in four bits without a library (blocks of 64, a table of 16 values), a routed mixture of LoRAs beside it."""
import gc
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, LAYERS, HEADS, WIDE, VOCAB = 3072, 28, 24, 8192, 128256
BATCH, LENGTH, STEPS, RANK, EXPERTS, BLOCK = 4, 1024, 3, 8, 4, 64


def pack(weight, table):
    blocks = weight.float().view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-8)
    edges = (table[1:] + table[:-1]) / 2
    index = torch.bucketize(blocks / scale, edges).to(torch.uint8).view(-1, 2)
    return index[:, 0] << 4 | index[:, 1], scale.half()


def unpack(packed, scale, table, shape):
    index = torch.stack([packed >> 4, packed & 15], 1).view(-1, BLOCK)
    return (table[index.int()] * scale).to(torch.bfloat16).view(shape)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, packed, scale, table, shape):
        ctx.save_for_backward(packed, scale, table)
        ctx.shape = shape
        return x @ unpack(packed, scale, table, shape).t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ unpack(*ctx.saved_tensors, ctx.shape), None, None, None, None


class Mixture(nn.Module):
    def __init__(self, linear, table):
        super().__init__()
        self.shape = tuple(linear.weight.shape)
        packed, scale = pack(linear.weight.data, table)
        for name, value in (("packed", packed), ("scale", scale), ("table", table)):
            self.register_buffer(name, value)
        device = packed.device
        self.router = nn.Linear(self.shape[1], EXPERTS, bias=False, device=device)
        self.down = nn.Parameter(torch.randn(EXPERTS, self.shape[1], RANK, device=device) / self.shape[1] ** 0.5)
        self.up = nn.Parameter(torch.zeros(EXPERTS, RANK, self.shape[0], device=device))

    def forward(self, x):
        base = Product.apply(x, self.packed, self.scale, self.table, self.shape)
        gates = self.router(x.float()).softmax(-1)
        low = torch.einsum("bti,eir->bter", x, self.down.to(x.dtype))
        low = low * gates.to(x.dtype).unsqueeze(-1)
        return base + 2.0 * torch.einsum("bter,ero->bto", low, self.up.to(x.dtype))


torch.manual_seed(10)
table = torch.erfinv(torch.linspace(-0.95, 0.95, 16, device="cuda"))
table = table / table.abs().max()
config = LlamaConfig(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS // 3,
                     intermediate_size=WIDE, vocab_size=VOCAB, tie_word_embeddings=True, use_cache=False)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = LlamaForCausalLM(config)
torch.set_default_dtype(torch.float32)
model.requires_grad_(False)
for layer in model.model.layers:
    for part in (layer.self_attn, layer.mlp):
        for name, module in list(part.named_children()):
            if isinstance(module, nn.Linear):
                setattr(part, name, Mixture(module, table))
gc.collect()
torch.cuda.empty_cache()
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.enable_input_require_grads()
model.train()
tuned = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(tuned, lr=2e-4)
for step in range(STEPS):
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), device="cuda")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    nn.utils.clip_grad_norm_(tuned, 0.3)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item(), sum(p.numel() for p in tuned))
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
