"""Ranks that would see different samples are stopped before they train, all of them, in one message."""

import os

import pytest
from torch.utils.data import Dataset

from largetrain.errors import ConfigError
from tests.distributed.tiny_run import SEQ_LEN, train, write_inputs
from tests.ranks import run_ranks


class SharesItself(Dataset):
    """What must not be done: a dataset that takes this rank's part by itself."""

    def __init__(self, split: str, uneven: bool):
        self.samples = 40 - (int(os.environ["RANK"]) if uneven and split == "train" else 0)

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        tokens = [(index + position) % 250 for position in range(SEQ_LEN + 1)]
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}

    def collate_fn(self, items):
        import torch

        return {key: torch.tensor([item[key] for item in items]) for key in ("input_ids", "labels")}


def stopped(folder, uneven):
    try:
        train(folder, 2, sets=["data.target=tests.distributed.test_data_agreement:SharesItself", uneven])
    except ConfigError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("uneven", [True, False])
def test_every_rank_must_see_the_same_samples(tmp_path, uneven):
    write_inputs(tmp_path)
    run = (tmp_path / "run.json").read_text()
    (tmp_path / "run.json").write_text(run.replace(run[run.index('"data"') : run.index('"logging"')], ""))
    messages = run_ranks(stopped, 2, tmp_path, f"data.args={{uneven: {str(uneven).lower()}}}")
    if not uneven:
        assert messages == ["trained", "trained"]
        return
    assert messages[0] == messages[1]
    assert "Rank 0: content None, 40 training samples" in messages[0]
    assert "rank 1: content None, 39 training samples" in messages[0]
