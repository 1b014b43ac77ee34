"""The training loop that a competent user writes with DeepSpeed alone: one of the programs that are compared.

deepspeed --num_gpus 2 --module tests.bench.plain_deepspeed --job FILE --report FOLDER
"""

import argparse
from collections.abc import Iterator
from contextlib import nullcontext

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.bench.job import Job, Meter

LOG_EVERY = 10


def forever(loader: DataLoader, sampler: DistributedSampler) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of one epoch after the other."""
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--job", required=True)
    parser.add_argument("--report", required=True)
    args = parser.parse_args()
    job, meter = Job.read(args.job), Meter(args.report)

    deepspeed.init_distributed()
    sharded = job.engine["zero_optimization"]["stage"] == 3
    with deepspeed.zero.Init(config_dict_or_path=job.engine) if sharded else nullcontext():
        model = job.build_model()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=job.engine)
    data = job.open_data()
    sampler: DistributedSampler = DistributedSampler(data, seed=job.seed)
    loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler)
    batches = forever(loader, sampler)

    losses = {}
    for step in range(1, job.steps + 1):
        for _ in range(engine.gradient_accumulation_steps()):
            batch = next(batches)
            loss_sum, count = engine(batch["input_ids"].to(engine.device), batch["labels"].to(engine.device))
            loss = loss_sum / count
            engine.backward(loss)
            engine.step()
        if step == 1 or step % LOG_EVERY == 0 or step == job.steps:
            losses[step] = loss.item()
            if engine.global_rank == 0:
                print(f"step {step}: loss {losses[step]:.4f}", flush=True)
        meter.update_done()
    meter.close(losses)


if __name__ == "__main__":
    main()
