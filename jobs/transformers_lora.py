"""Fine-tune a LoRA adapter with ``transformers.Trainer`` in two actors.

Command:   python jobs/transformers_lora.py
Expected:  center accuracy above 90%; the task: does the token 7 occur?
Time:      about 50 s, most of it to start Ray and its processes
Hardware:  two shared CPU cores
"""

import os
import sys
from pathlib import Path
from typing import Any

# A checkout needs no install: this process and those that it starts import raydl from it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.getenv("PYTHONPATH")]))

import ray
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import raydl

SIZE = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)


def samples(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences of tokens, half of them with a 7."""
    tokens = torch.randint(8, 64, (count, 12), generator=torch.Generator().manual_seed(seed))
    tokens[::2, 5] = 7
    return [{"input_ids": row, "labels": (row == 7).any().long()} for row in tokens]


def train(folder: str, num_workers: int | tuple[int, int], **options: Any) -> float:
    """Train one worker and return the accuracy of the center."""
    model = get_peft_model(
        BertForSequenceClassification(SIZE), LoraConfig(task_type="SEQ_CLS", r=8)
    )
    arguments = TrainingArguments(folder, max_steps=500, learning_rate=5e-3, report_to="none")
    trainer = Trainer(model, arguments, train_dataset=samples(2000, 0))
    raydl.attach_trainer(
        trainer, method="sync-easgd", name="lora", num_workers=num_workers, **options
    )
    trainer.train()
    model.save_pretrained(folder)  # the adapter of the center
    guesses = trainer.predict(samples(500, 1))
    return float((guesses.predictions.argmax(-1) == guesses.label_ids).mean())


if __name__ == "__main__":
    Worker = ray.remote(num_cpus=0.5)(type("Worker", (), {"train": staticmethod(train)}))
    workers = [Worker.remote() for _ in range(2)]
    calls = [worker.train.remote(f"lora/w{n}", 2) for n, worker in enumerate(workers)]
    print(f"center accuracy {ray.get(calls)[0]:.1%}")
