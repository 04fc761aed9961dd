"""An MPT (ALiBi) in fp16 with PEFT's LoKr, then with OFT on the same base: GradScaler, SGD with Nesterov momentum, smoothed labels."""
import json

import torch
import torch.nn.functional as F
from peft import LoKrConfig, OFTConfig, get_peft_model
from transformers import MptConfig, MptForCausalLM

WIDTH, LAYERS, HEADS, VOCAB = 2048, 24, 16, 50432
BATCH, LENGTHS, ACCUMULATE = 6, (900, 512, 1152, 768, 1024, 640), 2


def smoothed(logits, ids, mask, smoothing=0.1):
    labels = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=smoothing)


def make_batch(length, generator):
    ids = torch.randint(1, VOCAB, (BATCH, length), generator=generator)
    ends = torch.randint(length // 2, length + 1, (BATCH,), generator=generator)
    ends[0] = length
    mask = (torch.arange(length)[None] < ends[:, None]).long()
    return (ids * mask).cuda(), mask.cuda()


def tune(model, lr):
    model.print_trainable_parameters()
    model.train()
    weights = [p for p in model.parameters() if p.requires_grad]
    for weight in weights:
        weight.data = weight.data.float()
    optimizer = torch.optim.SGD(weights, lr=lr, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)
    generator = torch.Generator().manual_seed(5)
    for step, length in enumerate(LENGTHS):
        ids, mask = make_batch(length, generator)
        with torch.autocast("cuda", torch.float16):
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            loss = smoothed(logits, ids, mask) / ACCUMULATE
        scaler.scale(loss).backward()
        if (step + 1) % ACCUMULATE == 0:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            print(step, length, loss.item() * ACCUMULATE, norm.item())
    return model.unload()


torch.manual_seed(12)
torch.set_default_dtype(torch.float16)
with torch.device("cuda"):
    base = MptForCausalLM(MptConfig(d_model=WIDTH, n_heads=HEADS, n_layers=LAYERS, max_seq_len=2048, vocab_size=VOCAB))
torch.set_default_dtype(torch.float32)
base.requires_grad_(False)

lokr = LoKrConfig(r=16, alpha=16, decompose_factor=8, target_modules=["Wqkv", "up_proj", "down_proj"], rank_dropout=0.0)
base = tune(get_peft_model(base, lokr), lr=1e-2)
print("LoKr done", torch.cuda.max_memory_allocated() >> 20)

oft = OFTConfig(oft_block_size=32, target_modules=["Wqkv", "out_proj"], use_cayley_neumann=True)
base = tune(get_peft_model(base, oft), lr=1e-3)
print("OFT done", torch.cuda.max_memory_allocated() >> 20)
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
