"""Whose fault it was, and what the terminal shows of it."""

import pytest

from largetrain.hosts.console import Console, drain, last_words
from largetrain.hosts.outcome import Outcome, RankEnd, decide


def end(rank, code, explained=False):
    return RankEnd(rank, f"h{rank}", code, explained)


@pytest.mark.parametrize(
    ("ends", "lost", "code", "rank"),
    [
        ([end(0, 0), end(1, 0)], [], 0, None),
        ([end(0, 0)], [], 1, None),  # one was killed in the end
        ([end(0, 1), end(1, 3)], [], 3, 1),  # the peer's end was heard first
        ([end(0, 1), end(1, 1, True)], [], 1, 1),
        ([end(0, 1), end(1, -9)], [], 137, 1),
        ([end(1, -11), end(0, -9)], [], 139, 1),
        ([end(1, 1), end(0, 1)], [], 1, 1),
        ([end(0, 1)], ["h1"], 1, None),  # the host's end explains the rank's
        ([end(0, 1, True)], ["h1"], 1, None),
        ([end(0, 2)], ["h1"], 2, 0),
        ([end(1, 0), end(0, 75)], [], 75, 0),
        ([], ["h0", "h1"], 1, None),
        ([end(0, 0), end(1, 0)], ["h1"], 1, None),
    ],
)
def test_the_first_to_fail(ends, lost, code, rank):
    outcome = decide(ends, lost, 2, asked=False)
    assert (outcome.code, outcome.rank) == (code, rank)
    assert outcome.lost == tuple(lost)


@pytest.mark.parametrize("code", [0, 1, 2, 3, 75, 130, 137, 139, 143])
def test_what_is_worth_a_restart(code):
    assert Outcome(code).is_worth_a_restart == (code in (1, 137, 139))
    assert not Outcome(code, asked=True).is_worth_a_restart


TRACE = ["Traceback (most recent call last):", '  File "x"', "ValueError: a"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["step 1", *TRACE], TRACE),
        (["step 1", *TRACE, "step 2", "", *TRACE, "later"], [*TRACE, "later"]),
        (
            ["x", *TRACE, "", "During handling of the above exception, another exception occurred:", "", *TRACE],
            [*TRACE, "", "During handling of the above exception, another exception occurred:", "", *TRACE],
        ),
        ([str(number) for number in range(40)], [str(number) for number in range(25, 40)]),
        ([], []),
    ],
)
def test_last_words(lines, words):
    assert last_words(lines) == words


def test_files_and_names(tmp_path, capsys):
    console = Console(tmp_path / "logs", ["a", "b"])
    console.take(1, "one\ntwo\n")
    console.take(1, "half")
    console.close()
    drain()
    assert capsys.readouterr().out == "b:1: one\nb:1: two\nb:1: half\n"
    assert (tmp_path / "logs" / "rank-00001-b.txt").read_text() == "one\ntwo\nhalf"
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["rank-00001-b.txt"]


def test_one_rank_needs_no_name(tmp_path, capsys):
    Console(tmp_path, ["a"]).take(0, "one\n")
    Console(tmp_path, ["a", "b"], quiet=True).take(0, "two\n")
    drain()
    assert capsys.readouterr().out == "one\n"
