"""Documents packed into one row, longest pack third; position_ids start anew in each document. accelerate, two passes a step."""
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Qwen2Config, Qwen2ForCausalLM

PACKS = [[700, 900, 448], [2000, 1500, 596], [9000, 4000, 3000, 384], [1024]]
GIB = 2**30


def collate(rows):
    (lengths,) = rows
    ids = torch.randint(0, 151936, (1, sum(lengths)))
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    labels = ids.masked_fill(places == 0, -100)
    return {"input_ids": ids, "position_ids": places, "labels": labels}


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    config = Qwen2Config(vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36,
                         num_attention_heads=16, num_key_value_heads=2, tie_word_embeddings=True,
                         max_position_embeddings=32768, use_cache=False, attn_implementation="sdpa")
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    loader = DataLoader(PACKS, batch_size=1, shuffle=False, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    peaks = []
    for batch in loader:
        torch.cuda.reset_peak_memory_stats()
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated())
        accelerator.print(batch["input_ids"].shape[1], "tokens", round(peaks[-1] / GIB, 2), "GiB")
    assert max(peaks) == peaks[2], peaks
    assert 36 * GIB < peaks[2] < 52 * GIB, peaks
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
