"""Sharing out what every rank holds."""

import pytest
import torch

from largetrain.parallel.pieces import Piece, share_out


def pieces(*sizes):
    return [Piece(f"model/{index}", (size,), 0, torch.zeros(size)) for index, size in enumerate(sizes)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_every_piece_goes_to_one_rank(world_size):
    whole = pieces(5, 100, 1, 7, 60, 60, 3, 0)
    shares = [share_out(whole, rank, world_size) for rank in range(world_size)]
    assert sorted(piece.key for share in shares for piece in share) == [piece.key for piece in whole]
    for share in shares:
        assert [piece.key for piece in share] == sorted(piece.key for piece in share)  # in the given order


def test_ranks_get_about_as_many_bytes():
    whole = pieces(*range(1, 101))
    loads = [sum(piece.values.numel() for piece in share_out(whole, rank, 4)) for rank in range(4)]
    assert sum(loads) == 5050
    assert max(loads) - min(loads) <= 4  # largest first: within the smallest pieces of one another
