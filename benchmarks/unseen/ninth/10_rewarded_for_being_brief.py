"""GRPO of a 1.5B with an adapter on one 4090: brief answers that do not repeat themselves."""
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

VOCAB = 151936


def tokenizer():
    words = {f"w{i}": i for i in range(VOCAB - 2)} | {"<pad>": VOCAB - 2, "<eos>": VOCAB - 1}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="w0")


def brief(completions, **kwargs):
    return [-abs(40 - len(text.split())) / 40 for text in completions]


def varied(completions, **kwargs):
    return [len(set(text.split())) / max(1, len(text.split())) for text in completions]


def main():
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=VOCAB - 1,
        pad_token_id=VOCAB - 2,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    prompts = [" ".join(f"w{(7 * i + j) % 5000}" for j in range(24 + i % 9)) for i in range(64)]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[brief, varied],
        args=GRPOConfig(
            output_dir="brief",
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            num_generations=8,
            max_completion_length=256,
            max_steps=2,
            learning_rate=1e-5,
            beta=0.0,
            bf16=True,
            gradient_checkpointing=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
