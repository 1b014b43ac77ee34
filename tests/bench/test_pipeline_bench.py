"""The benchmark of pipelines: its ideal times, and that it measures. The benchmark itself is not part of CI."""

import pytest

from tests.bench import pipeline
from tests.bench.pipeline import CUTS, counts_of, ideal, main


def test_equal_stages_work_m_of_m_and_one_turns():
    assert [ideal("even", count) for count in (1, 2, 4, 8, 16)] == pytest.approx([1 / 2, 2 / 3, 4 / 5, 8 / 9, 16 / 17])


def test_unequal_stages_wait_for_the_slower_one():
    """Six of eight layers: a turn takes 6/4 of an even one, and the last micro-batch goes through the other as well."""
    assert ideal("uneven", 1) == 0.5
    assert ideal("uneven", 1000) == pytest.approx(4 / 6, rel=1e-3)


def played(stages, micro_batches):
    """Time that DualPipeV's schedule takes, in turns of a whole stage: 1/6 forward, 1/3 backward for each of its runs.

    Sends are on their way at once; a stage waits only for what it receives.
    """
    from deepspeed.runtime.pipe.schedule import DualPipeVSchedule

    programs = [
        [command for step in DualPipeVSchedule(micro_batches, stages, stage).steps() for command in step]
        for stage in range(stages)
    ]
    clocks, places, arrived = [0.0] * stages, [0] * stages, {}
    queued = [[] for _ in range(stages)]
    while any(place < len(program) for place, program in zip(places, programs, strict=True)):
        before = list(places)
        for stage, program in enumerate(programs):
            while places[stage] < len(program):
                command = program[places[stage]]
                if command.name.startswith(("Send", "Recv")):
                    queued[stage].append(command)
                elif command.name == "CommitP2P":
                    messages = [_message(stage, one) for one in queued[stage]]
                    for sends, key in messages:
                        if sends:
                            arrived.setdefault(key, clocks[stage])
                    wanted = [key for sends, key in messages if not sends]
                    if not all(key in arrived for key in wanted):
                        break
                    clocks[stage] = max([clocks[stage], *(arrived[key] for key in wanted)])
                    queued[stage].clear()
                elif command.name in ("ForwardPass", "BackwardPass"):
                    clocks[stage] += 1 / 6 if command.name == "ForwardPass" else 1 / 3
                places[stage] += 1
        assert places != before, "the schedule waits for ever"
    return max(clocks)


def _message(stage, command):
    """Whether it sends, and what names it on both sides."""
    forward = command.name.endswith("Activation")
    sends = command.name.startswith("Send")
    downstream = stage + (1 if command.phase == 0 else -1)
    upstream = stage - (1 if command.phase == 0 else -1)
    peer = downstream if sends == forward else upstream
    return sends, (forward, command.buffer_id, *((stage, peer) if sends else (peer, stage)))


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_ideal_of_dualpipev_is_its_schedule_played_through(stages, monkeypatch):
    monkeypatch.setattr(pipeline, "STAGES", stages)
    for count in (2 * stages, 4 * stages):
        assert ideal("dualpipev", count) == pytest.approx(count / played(stages, count))
        assert count / (count + stages - 1) < ideal("dualpipev", count) < 1  # above that of 1F1B


def test_dualpipev_is_measured_where_it_can_run():
    assert counts_of("dualpipev", [1, 2, 4, 8]) == [4, 8] and counts_of("even", [1, 2]) == [1, 2]


def test_it_measures_every_cut(capsys):
    main(["--width", "8", "--rows", "4", "--rounds", "1", "--updates", "1", "--micro-batches", "1", "4"])
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert rows == [[name, str(count)] for name in CUTS for count in counts_of(name, [1, 4])]
