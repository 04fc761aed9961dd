"""REINFORCE with a LoRA adapter: every round the policy writes answers with its cache, then learns from them."""
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

PROMPTS, PROMPT_LEN, NEW = 16, 128, 64

cfg = LlamaConfig(vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28,
                  num_attention_heads=24, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
                  max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2)
base = LlamaForCausalLM(cfg).to(torch.bfloat16).to("cuda")
policy = get_peft_model(base, LoraConfig(r=16, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
policy.print_trainable_parameters()
opt = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-4)
how = GenerationConfig(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=True, top_k=50, pad_token_id=0)


def reward(answers: torch.Tensor) -> torch.Tensor:
    """Likes answers that are full of different tokens."""
    ordered = answers.sort(dim=1).values
    return (ordered[:, 1:] != ordered[:, :-1]).float().mean(dim=1)


def logprobs(model, tokens):
    logits = model(input_ids=tokens, use_cache=False).logits[:, PROMPT_LEN - 1 : -1]
    taken = torch.log_softmax(logits.float(), dim=-1)
    return taken.gather(-1, tokens[:, PROMPT_LEN:, None]).squeeze(-1)


for round_ in range(2):
    prompts = torch.randint(3, cfg.vocab_size, (PROMPTS, PROMPT_LEN), device="cuda")
    policy.eval()
    with torch.no_grad():
        tokens = policy.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), generation_config=how)
    assert tokens.shape == (PROMPTS, PROMPT_LEN + NEW), tokens.shape
    score = reward(tokens[:, PROMPT_LEN:])
    advantage = (score - score.mean()) / (score.std() + 1e-4)

    policy.train()
    loss = -(logprobs(policy, tokens) * advantage[:, None]).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    opt.step()
    opt.zero_grad(set_to_none=True)
    print(round_, loss.item(), score.mean().item())
policy.save_pretrained("adapter")
