"""Peak FLOP/s by the device's name."""

import pytest
import torch

from largetrain.engine.peak import peak_flops

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 311.9),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA RTX A4000", None),  # not an A40
        ("NVIDIA RTX A1000", None),  # not an A100
        ("NVIDIA T400", None),  # not a T4
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_known_devices_by_whole_words(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    expected = None if tflops is None else tflops * 1e12
    assert peak_flops(CUDA, torch.bfloat16) == expected
    assert peak_flops(CUDA, torch.float16) == expected


def test_no_peak_where_the_table_says_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert peak_flops(CUDA, torch.float32) is None
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None
