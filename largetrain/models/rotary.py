"""Rotary position embedding (Su et al. 2021), exact in every precision.

The table is kept out of the modules: DeepSpeed casts modules, buffers included, and in bf16 the angle of position
1000 would be off by up to 2 radians. Pairs are (i, i + width/2), as in Hugging Face's weights; the weights that Meta
released pair (2i, 2i + 1) and need their query and key rows permuted.
"""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=16)
def rotary_table(
    seq_len: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Give cos and sin, each [seq_len, head_dim / 2] of `dtype`, of position x theta^(-2i / head_dim).

    Angles are computed in fp64: in fp32 their error grows with the position. Kept for the next call.
    """
    with torch.inference_mode(False), torch.no_grad():  # a table made during evaluation must serve training too
        frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
        angles = torch.outer(torch.arange(seq_len, dtype=torch.float64, device="cpu"), frequencies)
        return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def rotate(x: Tensor, theta: float) -> Tensor:
    """Turn each pair of x [..., seq_len, head_dim] by its position's angle; same shape and dtype.

    Computed in fp32 (fp64 for fp64) and rounded once.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = rotary_table(x.shape[-2], x.shape[-1], theta, x.device, dtype)
    first, second = x.to(dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
