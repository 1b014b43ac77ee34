"""Images per second of one loader, over a folder of JPEGs, with the augmentation of ImageNet training.

python -m tests.bench.image_loading --loader ours|timm --folder FOLDER --workers N --batch N --batches N --warm N
prints one line of JSON. Both decode with Pillow, draw a RandomResizedCrop and a flip, and normalise in the loader's
processes; timm's prefetcher, which would move the normalisation to the consumer, is off.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

SIZE = 224
IMAGE_SIZE, CLASSES = 256, 10
SMOOTH = 16
"""Pixels per independent random value: photographs vary slowly, and the time to decode depends on it."""


def make_images(folder: Path, count: int) -> None:
    """Write seeded JPEGs of 256 x 256 in folders of classes: coarse shapes with a little noise, about 20 KB each."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for index in range(count):
        target = folder / f"class-{index % CLASSES}" / f"{index:05d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        coarse = rng.integers(0, 256, (IMAGE_SIZE // SMOOTH, IMAGE_SIZE // SMOOTH, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC))
        noisy = smooth + rng.normal(0, 6, smooth.shape)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(target, quality=90)


def our_batches(folder: Path, workers: int, batch: int) -> Iterator[Any]:
    """largetrain's stream of one rank, as a training run makes it."""
    from largetrain.config.batch import Batch
    from largetrain.config.vision_schema import ClassificationData, ClassificationRun
    from largetrain.data.classification import build_classification
    from largetrain.data.loader import TrainStream
    from largetrain.data.order import SampleOrder

    data = ClassificationData(source=str(folder), validation_fraction=1e-6, image_size=SIZE, workers=workers)
    train = build_classification(ClassificationRun(data=data)).train
    stream = TrainStream(train, SampleOrder(len(train), batch, 1), Batch(1, 1, batch, 1, batch), 0, workers=workers)
    return (one["images"] for one in stream)


def timm_batches(folder: Path, workers: int, batch: int) -> Iterator[Any]:
    """timm's loader with the same augmentation, one epoch after the other."""
    from timm.data import create_dataset, create_loader

    dataset = create_dataset("", root=str(folder), is_training=True, batch_size=batch)
    augmentation: dict[str, Any] = {"interpolation": "bilinear", "color_jitter": None}  # crop and flip by default
    loader = create_loader(
        dataset, (3, SIZE, SIZE), batch, is_training=True, num_workers=workers, use_prefetcher=False, **augmentation
    )
    while True:
        yield from (images for images, _ in loader)


def images_per_s(batches: Iterator[Any], batch: int, warm: int, measured: int) -> float:
    """Rate over `measured` batches after `warm` ones; what is prefetched at the beginning is so at the end as well."""
    for number in range(warm + measured):
        images = next(batches)
        assert images.shape == (batch, 3, SIZE, SIZE) and images.dtype == torch.float32
        if number == warm - 1:
            started = time.perf_counter()
    return batch * measured / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--loader", choices=("ours", "timm"), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    for name in ("workers", "batch", "batches", "warm"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    make = our_batches if args.loader == "ours" else timm_batches
    rate = images_per_s(make(args.folder, args.workers, args.batch), args.batch, args.warm, args.batches)
    print(json.dumps({"images_per_s": rate}))


if __name__ == "__main__":
    main()
