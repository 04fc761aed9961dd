"""A Persimmon in bf16: each weight is updated in the backward pass, by Adam on a low-rank picture of its gradient (GaLore)."""
import json

import torch
import torch.nn.functional as F
from transformers import PersimmonConfig, PersimmonForCausalLM

HIDDEN, LAYERS, HEADS, VOCAB = 2048, 24, 32, 64000
BATCH, LENGTH, STEPS, RANK, RENEW, LR = 4, 1536, 4, 128, 2, 1e-4


class Updater:
    """Called with a parameter whose gradient has just been accumulated; frees the gradient when it is done."""

    def __init__(self):
        self.state = {}
        self.norms = []

    def basis(self, gradient):
        """An orthonormal basis of about the gradient's strongest directions, by one random probe and one power step."""
        wide = gradient.shape[0] < gradient.shape[1]
        matrix = gradient if wide else gradient.T
        probe = matrix @ torch.randn(matrix.shape[1], RANK, device=gradient.device)
        q, _ = torch.linalg.qr(matrix @ (matrix.T @ probe))
        return q, wide

    @torch.no_grad()
    def __call__(self, parameter):
        gradient = parameter.grad.float()
        self.norms.append(gradient.norm())
        state = self.state.setdefault(parameter, {"step": 0})
        projected = parameter.ndim == 2 and min(parameter.shape) > RANK and max(parameter.shape) < VOCAB
        if projected:
            if state["step"] % RENEW == 0:
                state["basis"], state["wide"] = self.basis(gradient)
            q = state["basis"]
            small = q.T @ gradient if state["wide"] else gradient @ q
        else:
            small = gradient
        if state["step"] == 0:
            state["mean"], state["square"] = torch.zeros_like(small, dtype=torch.bfloat16), torch.zeros_like(small, dtype=torch.bfloat16)
        state["step"] += 1
        state["mean"].lerp_(small.to(torch.bfloat16), 0.1)
        state["square"].mul_(0.99).addcmul_(small.to(torch.bfloat16), small.to(torch.bfloat16), value=0.01)
        update = state["mean"].float() / (state["square"].float().sqrt() + 1e-6)
        if projected:
            update = state["basis"] @ update if state["wide"] else update @ state["basis"].T
        parameter.add_(update.to(parameter.dtype), alpha=-LR)
        parameter.grad = None


torch.manual_seed(21)
config = PersimmonConfig(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS,
                         num_attention_heads=HEADS, max_position_embeddings=4096, hidden_dropout=0.0, attention_dropout=0.0)
with torch.device("cuda"):
    model = PersimmonForCausalLM(config).to(torch.bfloat16)
model.train()
update = Updater()
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)

for step in range(STEPS):
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), device="cuda")
    logits = model(input_ids=ids, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    del logits
    loss.backward()
    print(step, loss.item(), torch.stack(update.norms).norm().item())
    update.norms.clear()
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
