from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass
class Args:
    learning_rate: float = 1e-6
    batch_size: int = 4
    epochs: int = 2
    warmup: int = 2
    seed: int = 0


def get_model():
    config = LlamaConfig(vocab_size=128, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16)


def get_data(batch_size):
    ids = (torch.arange(24 * 20).view(24, 20) * 7) % 128
    return DataLoader(TensorDataset(ids), batch_size=batch_size)


def train(args):
    torch.manual_seed(args.seed)
    model = get_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / args.warmup))
    model.train()
    for epoch in range(args.epochs):
        for (ids,) in get_data(args.batch_size):
            ids = ids.cuda()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        print(f"epoch {epoch} loss {loss.item():.5f}")


if __name__ == "__main__":
    train(Args())
