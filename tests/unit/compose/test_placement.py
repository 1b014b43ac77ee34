"""The table of ranks."""

from largetrain.compose.placement import placement_report
from largetrain.config.layout import Layout


def test_every_rank_with_host_and_coordinates():
    lines = placement_report(Layout(8, tensor=2, stages=2), ["a"] * 4 + ["b"] * 4)
    assert lines == [
        "layout: pipeline 2 x data 2 x tensor 2",
        "  rank  host  stage  data  tensor",
        "  0     a     0      0     0",
        "  1     a     0      0     1",
        "  2     a     0      1     0",
        "  3     a     0      1     1",
        "  4     b     1      0     0",
        "  5     b     1      0     1",
        "  6     b     1      1     0",
        "  7     b     1      1     1",
    ]


def test_plain_data_parallelism_needs_no_table():
    assert placement_report(Layout(4), ["a"] * 4) == []


def test_tensor_ranks_on_two_hosts_are_noted():
    lines = placement_report(Layout(4, tensor=2), ["a", "b", "b", "b"])
    (note,) = [line for line in lines if line.startswith("note")]
    assert "ranks 0 to 1" in note and "hosts a, b" in note and "multiples of 2" in note


def test_many_ranks_are_shortened():
    lines = placement_report(Layout(512, tensor=8), [f"h{rank // 8}" for rank in range(512)])
    assert len(lines) < 40 and lines[-1].split() == ["511", "h63", "63", "7"]
