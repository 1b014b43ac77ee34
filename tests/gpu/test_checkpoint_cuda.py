"""Tensors of a CUDA device are copied to pinned memory for a checkpoint, to the bit."""

import torch

from largetrain.checkpoint.staging import Staging, plan
from largetrain.parallel.pieces import Piece


def pieces(device, seed):
    torch.manual_seed(seed)
    tensors = {
        "fp32": torch.randn(300_007, device=device),
        "bf16": torch.randn(1001, device=device).bfloat16(),
        "count": torch.tensor([seed], device=device),
        "none": torch.zeros(0, device=device),
        "on the host": torch.randn(17),
    }
    return [Piece(key, tuple(values.shape), 0, values) for key, values in tensors.items()]


def test_the_copy_is_what_the_device_held():
    staging = Staging()
    for seed in range(3):
        live = pieces("cuda", seed)
        expected = bytes(Staging().fill(plan([Piece(p.key, p.shape, 0, p.values.cpu()) for p in live])))
        image = staging.fill(plan(live))
        for piece in live:
            piece.values.zero_()  # the next update
        torch.cuda.synchronize()
        assert bytes(image) == expected
    assert staging._pinned
    staging.close()
    assert not staging._pinned


def test_pinned_memory_grows():
    staging = Staging()
    for count in (1000, 10_000_000):
        values = torch.arange(count, device="cuda")
        planned = plan([Piece("a", (count,), 0, values)])
        data = staging.fill(planned)[len(planned.header) :]
        assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.int64), values.cpu())
    staging.close()
