"""The same training with Hugging Face's Trainer over DeepSpeed: one of the programs that are compared.

deepspeed --num_gpus 2 --module tests.bench.hf_trainer --job FILE --report FOLDER
"""

import argparse
from contextlib import nullcontext

import deepspeed
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.bench.job import Job, Meter

LOG_EVERY = 10


class ForTrainer(nn.Module):
    """The decoder with the signature that Trainer asks for: the mean loss in a dict."""

    def __init__(self, decoder: nn.Module):
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss_sum, count = self.decoder(input_ids, labels)
        return {"loss": loss_sum / count}


class MeterCallback(TrainerCallback):
    """Notes the end of each update, and the losses that Trainer logs."""

    def __init__(self, meter: Meter):
        self.meter = meter
        self.losses: dict[int, float] = {}

    def on_step_end(self, args, state, control, **kwargs):
        self.meter.update_done()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            self.losses[state.global_step] = float(logs["loss"])


def training_arguments(job: Job, folder: str) -> TrainingArguments:
    """The engine JSON's numbers again, since Trainer refuses to run where the two differ."""
    adam = job.engine["optimizer"]["params"]
    return TrainingArguments(
        output_dir=folder,
        deepspeed=job.engine,
        per_device_train_batch_size=job.engine["train_micro_batch_size_per_gpu"],
        gradient_accumulation_steps=job.engine["gradient_accumulation_steps"],
        learning_rate=adam["lr"],
        adam_beta1=adam["betas"][0],
        adam_beta2=adam["betas"][1],
        adam_epsilon=adam["eps"],
        weight_decay=adam["weight_decay"],
        max_grad_norm=job.engine["gradient_clipping"],
        fp16=job.engine.get("fp16", {}).get("enabled", False),
        bf16=job.engine.get("bf16", {}).get("enabled", False),
        warmup_steps=job.engine["scheduler"]["params"]["warmup_num_steps"],
        max_steps=job.steps,
        seed=job.seed,
        logging_steps=LOG_EVERY,
        logging_first_step=True,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    )


def collate(samples: list[dict]) -> dict[str, torch.Tensor]:
    """Stack what forward takes; Trainer hands the whole batch to the model."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--job", required=True)
    parser.add_argument("--report", required=True)
    options = parser.parse_args()
    job, meter = Job.read(options.job), Meter(options.report)

    arguments = training_arguments(job, options.report)  # joins the process group
    sharded = job.engine["zero_optimization"]["stage"] == 3
    with deepspeed.zero.Init(config_dict_or_path=job.engine) if sharded else nullcontext():
        model = job.build_model()
    callback = MeterCallback(meter)
    Trainer(
        ForTrainer(model), arguments, data_collator=collate, train_dataset=job.open_data(), callbacks=[callback]
    ).train()
    meter.close(callback.losses)


if __name__ == "__main__":
    main()
