"""The ddp backend on a CUDA device: every precision trains and follows fp64; torch's SyncBatchNorm is used."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.ddp_nets import make_net, samples
from tests.distributed.test_ddp_parity import backend_for
from tests.gpu.test_cuda import train_rows

UPDATES = 8
CONV_NET = [
    *("task=classification", "model.name=resnet18", "data.source=synthetic", "data.classes=4", "data.samples=64"),
    *("data.image_size=32", "data.eval_size=32", "train_micro_batch_size_per_gpu=8", "optimizer.params.lr=1e-3"),
]


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """One process; NCCL does not put several ranks on one device."""
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def losses(device: torch.device, dtype: torch.dtype = torch.float32, **engine) -> list[float]:
    x, labels = samples(16, dtype)
    optimizer = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
    backend = backend_for(make_net(dtype), optimizer, 1, device, **engine)
    stream = iter([{"images": x, "labels": labels}] * UPDATES)
    found = [backend.train_step(stream) for _ in range(UPDATES)]
    assert all(result.applied for result in found)
    return [float(result.loss) for result in found]


@pytest.mark.parametrize(
    ("engine", "bound"),
    [({}, 2.0**-10), ({"bf16": {"enabled": True}}, 2.0**-7), ({"fp16": {"enabled": True}}, 2.0**-10)],
    ids=["fp32", "bf16", "fp16"],
)
def test_precisions_follow_fp64(group, engine, bound):
    """Unit roundoff of the products (TF32 keeps 10 bits, as fp16 does) at three layers, carried over the updates."""
    device = torch.device("cuda", 0)
    found = losses(device, **engine)
    assert found == pytest.approx(losses(device, torch.float64), rel=bound * 3 * UPDATES)
    assert found[-1] < found[0]


def test_converted_layers_run_torchs_function(group):
    from largetrain.parallel.sync_batch_norm import SyncBatchNorm2d, convert_sync_batch_norm

    ours, theirs = nn.BatchNorm2d(5).cuda(), nn.SyncBatchNorm(5).cuda()
    assert isinstance(convert_sync_batch_norm(ours, None), SyncBatchNorm2d)
    x = torch.randn(4, 5, 6, 6, device="cuda")
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.running_var, theirs.running_var)


@pytest.mark.parametrize("sets", [[], ["model.channels_last=true"], ["model.compile=true"]], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_command_trains_a_resnet(tmp_path, precision, sets):
    half = [f"{precision}.enabled=true"] if precision != "fp32" else []
    found = [row for row in train_rows(tmp_path, precision, *CONV_NET, *half, *sets) if "loss" in row]
    assert found[-1]["loss"] < found[0]["loss"]
    assert found[-1]["memory_bytes"][0] > 0
