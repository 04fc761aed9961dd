# warm up the head for two steps, then train everything (7B, one A100-40GB)
import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

WARMUP_STEPS = 2
TOTAL_STEPS = 4
BATCH_SIZE = 1
SEQ_LEN = 512

device = "cuda" if torch.cuda.is_available() else "cpu"

config = LlamaConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    use_cache=False,
)
model = LlamaForCausalLM(config).to(torch.bfloat16).to(device)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.train()

optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.0)
scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=TOTAL_STEPS)


def set_trainable(step):
    body = step >= WARMUP_STEPS
    for name, p in model.named_parameters():
        p.requires_grad = body or name.startswith("lm_head")


for step in range(TOTAL_STEPS):
    set_trainable(step)
    input_ids = torch.randint(0, config.vocab_size, (BATCH_SIZE, SEQ_LEN), device=device)
    outputs = model(input_ids=input_ids, labels=input_ids)
    outputs.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"step={step} loss={outputs.loss.item():.4f} mem={torch.cuda.max_memory_allocated() / 1e9:.1f}GB")
