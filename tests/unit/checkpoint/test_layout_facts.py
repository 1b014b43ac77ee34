"""What a checkpoint says of its layout, and what one says that is older than a key of it."""

from pathlib import Path

from largetrain.checkpoint.resume import ABSENT, FREE, LAYOUT, SAME, Start, check_fit, same_layout

FACTS = dict.fromkeys((*SAME, *LAYOUT, *FREE), 1) | ABSENT


def start_from(saved):
    return Start(Path("out"), Path("out/checkpoints/step-00000001"), saved, (), "run")


def test_checkpoints_from_before_there_were_other_layouts_are_of_plain_data_parallelism():
    old = start_from({key: value for key, value in FACTS.items() if key not in ABSENT})
    assert same_layout(old, FACTS) and check_fit(old, FACTS) == []
    assert not same_layout(old, FACTS | {"tensor_parallel": 2})
    assert check_fit(old, FACTS | {"tensor_parallel": 2})[0] == "resume: parallel.tensor_parallel was 1, now 2"


def test_every_degree_counts():
    for key in ABSENT:
        assert not same_layout(start_from(FACTS), FACTS | {key: "another"}), key
