"""The training loop that a competent user writes with torch alone: the rival of largetrain's `ddp` backend.

torchrun --nproc-per-node 2 -m tests.bench.bare_ddp --job FILE --report FOLDER [--tuned]
"""

import argparse
import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.models import get_model

from largetrain.data.classification import RandomImages
from tests.bench.job import Meter
from tests.bench.vision_job import LR, MOMENTUM, WEIGHT_DECAY, VisionJob

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
    parser.add_argument("--job", required=True)
    parser.add_argument("--report", required=True)
    parser.add_argument("--tuned", action="store_true", help="no broadcast of buffers, gradients live in DDP's buckets")
    args = parser.parse_args()
    job, meter = VisionJob.read(args.job), Meter(args.report)

    dist.init_process_group("gloo")
    torch.manual_seed(job.seed)
    net = get_model(job.model, num_classes=job.classes)
    if args.tuned:
        model = DistributedDataParallel(net, forward_sync_buffers=False, gradient_as_bucket_view=True)
    else:
        model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    data = RandomImages(np.arange(job.samples), job.image_size, job.classes)
    sampler: DistributedSampler = DistributedSampler(data, seed=job.seed)
    batches = forever(DataLoader(data, batch_size=job.micro_batch, sampler=sampler, drop_last=True), sampler)

    losses = {}
    for step in range(1, job.steps + 1):
        batch = next(batches)
        loss = cross_entropy(model(batch["images"]), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        if job.clip > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
        if step == 1 or step % LOG_EVERY == 0 or step == job.steps:
            losses[step] = loss.item()
            if dist.get_rank() == 0:
                print(f"step {step}: loss {losses[step]:.4f}", flush=True)
        meter.update_done()
    assert all(math.isfinite(loss) for loss in losses.values()), "an update that diverged is no update to time"
    meter.close(losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
