"""Texts sorted by a StableLM: LoRA and the head (modules_to_save), merged, then the upper layers in full; by Accelerate."""
import gc
import json

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import StableLmConfig, StableLmForSequenceClassification

HIDDEN, LAYERS, HEADS, WIDE, VOCAB, LABELS, UPPER = 2048, 24, 32, 5632, 100352, 40, 8
BATCH, SECOND_BATCH, LONGEST, STEPS, ACCUMULATE = 12, 20, 900, 3, 2

torch.manual_seed(17)
draw = torch.Generator().manual_seed(17)


def make_rows(count):
    lengths = torch.randint(LONGEST // 3, LONGEST, (count,), generator=draw).tolist()
    return [(torch.randint(1, VOCAB, (n,), generator=draw), n % LABELS) for n in lengths]


def collate(rows):
    ids = pad_sequence([row[0] for row in rows], batch_first=True, padding_value=0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([row[1] for row in rows])}


def train(accelerator, model, optimizer, loader):
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
            optimizer.step()
            optimizer.zero_grad()
    print(accelerator.gather(loss.detach()).mean().item(), torch.cuda.memory_allocated() >> 20, "MiB")
    model.eval()
    with torch.no_grad():
        guesses = model(**batch).logits.argmax(-1)
    print("right", accelerator.gather_for_metrics(guesses == batch["labels"]).float().mean().item())
    return model, optimizer, loader


config = StableLmConfig(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
                        intermediate_size=WIDE, vocab_size=VOCAB, num_labels=LABELS, pad_token_id=0, bos_token_id=1,
                        eos_token_id=2, use_cache=False, max_position_embeddings=4096)
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATE)
with torch.device("cuda"):
    base = StableLmForSequenceClassification(config).to(torch.bfloat16)
base.requires_grad_(False)
lora = LoraConfig(r=24, lora_alpha=48, lora_dropout=0.1, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"],
                  modules_to_save=["score"], task_type="SEQ_CLS")
adapted = get_peft_model(base, lora)
adapted.print_trainable_parameters()
optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=2e-4)
loader = DataLoader(make_rows(BATCH * STEPS * ACCUMULATE), BATCH, collate_fn=collate)
adapted, optimizer, loader = train(accelerator, adapted, optimizer, loader)

merged = accelerator.unwrap_model(adapted, keep_fp32_wrapper=False).merge_and_unload()
adapted, optimizer, loader, base = accelerator.free_memory(adapted, optimizer, loader, base)
gc.collect()
torch.cuda.empty_cache()
merged.requires_grad_(False)
for module in [*merged.model.layers[-UPPER:], merged.model.norm, merged.score]:
    module.float().requires_grad_(True)
merged.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
optimizer = torch.optim.NAdam([p for p in merged.parameters() if p.requires_grad], lr=1e-5)
train(accelerator, merged, optimizer, DataLoader(make_rows(SECOND_BATCH * STEPS * ACCUMULATE), SECOND_BATCH, collate_fn=collate))
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
