import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import BertConfig, BertForSequenceClassification


def build_model():
    config = BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=64, max_position_embeddings=64, num_labels=3)
    model = BertForSequenceClassification(config).half()
    lora = LoraConfig(task_type=TaskType.SEQ_CLS, r=4, lora_alpha=8, lora_dropout=0.1,
                      target_modules=["query", "value"], modules_to_save=["classifier"])
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()
    return model


class Trainer:
    def __init__(self, model, lr=1e-3, max_norm=1.0):
        self.model = model.cuda()
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.params, lr=lr)
        self.scaler = torch.amp.GradScaler("cuda")
        self.max_norm = max_norm

    def step(self, batch):
        batch = {k: v.cuda() for k, v in batch.items()}
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(**batch).loss
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = Trainer(build_model())
    trainer.model.train()
    for i in range(5):
        ids = torch.randint(1, 100, (4, 16))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 3}
        print(i, trainer.step(batch))
