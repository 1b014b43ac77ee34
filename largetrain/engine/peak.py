"""Dense peak FLOP/s of known accelerators, from their makers' data sheets, for MFU."""

import re

import torch

# tensor-core peak of dense half-precision products with fp32 accumulation, in TFLOP/s; NVIDIA's data sheets.
# The first name that the device's name contains as whole words counts, so longer names stand first.
HALF_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.5,
    "H100": 989.4,
    "A100": 311.9,
    "A800": 311.9,
    "A40": 149.7,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "V100": 125.0,
    "T4": 65.0,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of `device` for half precision, or None when unknown (CPUs, fp32, unlisted devices)."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for known, tflops in HALF_TFLOPS.items() if _names(known, name)), None)


def _names(known: str, name: str) -> bool:
    """Whether `known` stands in the device's name as whole words: "A40" is not in "NVIDIA RTX A4000"."""
    return re.search(rf"(?<!\w){re.escape(known)}(?!\w)", name) is not None
