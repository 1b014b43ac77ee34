"""What batch norm does to dense prediction at one image per rank: three trainings of `digits_deeplab.yaml`.

    python -m tests.sweeps.dense_batch_norm [--ranks 4] [KEY=VALUE ...]

1. one process with the whole global batch: the honest baseline;
2. as many ranks as images, batch norm synchronised, which is what `sync_batch_norm: auto` chooses;
3. the same ranks with plain batch norm. torch refuses the 1x1 map of DeepLab's pooling branch then, so that one batch
   norm is left out of the model in this run.

Prints the validation mIoU of each after every epoch. Minutes each; CI does not run it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from torch import nn
from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

ROOT = Path(__file__).parents[2]
RUN = "ds_configs/runs/digits_deeplab.yaml"
TARGET = "tests.sweeps.dense_batch_norm:deeplab_without_pooled_norm"


def deeplab_without_pooled_norm(num_classes: int) -> nn.Module:
    """DeepLabV3 without the batch norm behind global pooling, which sees one value per image and channel."""
    model = deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=num_classes, aux_loss=True)
    pooling = model.classifier[0].convs[-1]
    place = next(index for index, module in enumerate(pooling) if isinstance(module, nn.BatchNorm2d))
    pooling[place] = nn.Identity()
    return model


def run(folder: Path, ranks: int, micro_batch: int, sets: list[str]) -> list[float]:
    """Train and return the validation mIoU of each evaluation in percent."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    arguments = ["-m", "largetrain", "--ds_config", "ds_configs/zero2_fp32.json", "--output", str(folder)]
    arguments += ["--config", RUN, "--set", *sets]
    arguments += [f"train_micro_batch_size_per_gpu={micro_batch}", "checkpoints.at_end=false", "checkpoints.best=null"]
    subprocess.run([*command, *arguments], check=True, cwd=ROOT, timeout=3600, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["eval/miou"] for row in rows if "eval/miou" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("sets", nargs="*", metavar="KEY=VALUE", help="further --set values for all three runs")
    options = parser.parse_args()
    model = yaml.safe_load((ROOT / RUN).read_text())["model"] | {"target": TARGET}
    del model["name"]
    plain = [f"model={json.dumps(model)}", "sync_batch_norm=off"]
    runs = {
        f"one process, {options.ranks} images": (1, options.ranks, []),
        f"{options.ranks} ranks x 1 image, SyncBN": (options.ranks, 1, []),
        f"{options.ranks} ranks x 1 image, plain BN": (options.ranks, 1, plain),
    }
    with tempfile.TemporaryDirectory() as folder:
        for index, (name, (ranks, micro_batch, sets)) in enumerate(runs.items()):
            began = time.perf_counter()
            scores = run(Path(folder) / str(index), ranks, micro_batch, [*options.sets, *sets])
            shown = " ".join(f"{score:6.2f}" for score in scores)
            print(f"{name:<32} mIoU {shown}  ({time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
