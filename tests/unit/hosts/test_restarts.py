"""When a run is started again, with what, and when not; its starts are played here."""

import json
import signal
import threading
import time

import pytest

from largetrain.errors import ConfigError
from largetrain.hosts import restarts
from largetrain.hosts.attempt import Interrupted, Unreachable, Wishes
from largetrain.hosts.hostfile import Host
from largetrain.hosts.links import Event, Events
from largetrain.hosts.outcome import Outcome
from largetrain.hosts.restarts import Policy, Supervisor

HOSTS = [Host("a", 2), Host("b", 2), Host("c", 2)]
KILLED = Outcome(137, "rank 1 on a was killed", 1)


class Play:
    """Stands in for `Attempt`: each start is a dict with its outcome, unreachable hosts and the step found."""

    def __init__(self, *starts):
        self.starts, self.hosts, self.jobs = list(starts), [], []

    def __call__(self, job, hosts, wishes, events):
        return Played(self, job, hosts)


class Played:
    def __init__(self, play, job, hosts):
        self.play, self.job, self.hosts = play, job, hosts
        self.now = play.starts[0]

    def connect(self):
        away = {host.name: f"{host.name}: away" for host in self.hosts if host.name in self.now.get("away", "")}
        if away:
            if self.now.get("away_times", 99) <= 1:
                self.now["away"] = ""
            self.now["away_times"] = self.now.get("away_times", 99) - 1
            raise Unreachable(away)
        if "wrong" in self.now:
            raise ConfigError(self.now["wrong"])
        self.facts = {host.name: {"step": self.now.get("found"), "saved_s": None} for host in self.hosts}

    def names(self):
        return [host.name for host in self.hosts]

    def run(self, console, on_start):
        on_start()
        self.play.starts.pop(0)
        self.play.hosts.append([host.name for host in self.hosts])
        self.play.jobs.append(self.job)
        return self.now["outcome"]

    def close(self):
        if self.now in self.play.starts and self.now.get("gives_up"):
            self.play.starts.remove(self.now)


class FakeJob:
    def __init__(self, again, saved):
        self.again, self.saved = again, saved


def job_for(hosts, again, saved):
    if len(hosts) == 1:
        raise ConfigError("one cannot keep the batch")
    return FakeJob(again, saved)


@pytest.fixture
def supervise(monkeypatch, tmp_path):
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(restarts, "RETRY_S", 0.01)
    monkeypatch.setattr(restarts, "say", lambda line: None)

    def make(play, events=None, **policy):
        monkeypatch.setattr(restarts, "Attempt", play)
        policy = {"host_wait_s": 0.0, **policy}
        return Supervisor(HOSTS, Policy(**policy), Wishes(), job_for, tmp_path / "logs", events or Events())

    return make


def done(step=None):
    return {"outcome": Outcome(0, step=step)}


def failed(step=None, **more):
    return {"outcome": Outcome(137, "killed", 1, step=step), **more}


def test_a_run_that_is_done_is_not_started_again(supervise):
    play = Play(done())
    assert supervise(play, max_restarts=5).run().code == 0 and len(play.hosts) == 1


@pytest.mark.parametrize(
    "outcome", [Outcome(2), Outcome(3), Outcome(75), Outcome(130), Outcome(143), Outcome(1, asked=True)]
)
def test_what_another_start_does_not_mend(supervise, outcome):
    play = Play({"outcome": outcome})
    assert supervise(play, max_restarts=5).run() == outcome and len(play.hosts) == 1


def test_without_restarts_the_first_failure_is_the_last(supervise):
    assert supervise(Play(failed())).run().code == 137


def test_restarts_are_counted(supervise):
    play = Play(failed(1), failed(2, found=1), failed(3, found=2))
    assert supervise(play, max_restarts=2).run().code == 137 and len(play.hosts) == 3
    assert [(job.again, job.saved) for job in play.jobs] == [(False, False), (True, True), (True, True)]


def test_no_endless_failing_at_the_same_place(supervise):
    play = Play(failed(4), *(failed(found=4) for _ in range(9)))
    supervisor = supervise(play, max_restarts=50)
    assert supervisor.run().code == 137
    assert len(play.hosts) == 4, "the one that saved, and three that did not"


def test_progress_between_failures_resets_the_count(supervise):
    starts = [failed(step, found=step - 1) for step in range(1, 9)]
    assert supervise(Play(*starts, done(9)), max_restarts=50).run().code == 0


def test_a_checkpoint_that_a_lost_host_did_not_tell_of_is_found(supervise):
    """The next start's arguments depend on it."""
    play = Play(failed(None), done(7) | {"found": 6})
    supervisor = supervise(play, max_restarts=1)
    assert supervisor.run().code == 0
    assert [(job.again, job.saved) for job in play.jobs] == [(False, False), (True, True)]


def test_hosts_that_are_away_at_the_first_start(supervise):
    with pytest.raises(Unreachable, match="b: away"):
        supervise(Play(done() | {"away": "b"}), max_restarts=5).run()


def test_wrong_hosts_at_the_first_start(supervise):
    with pytest.raises(ConfigError, match="differs"):
        supervise(Play(done() | {"wrong": "differs"}), max_restarts=5).run()


def test_fewer_hosts_are_enough(supervise):
    play = Play(failed(3), done(9) | {"away": "b", "found": 3})
    assert supervise(play, max_restarts=1, min_hosts=2).run().code == 0
    assert play.hosts == [["a", "b", "c"], ["a", "c"]]


def test_a_host_that_comes_back_in_time_takes_part(supervise):
    play = Play(failed(3), done(9) | {"away": "b", "away_times": 3, "found": 3})
    assert supervise(play, max_restarts=1, min_hosts=2, host_wait_s=30).run().code == 0
    assert play.hosts == [["a", "b", "c"]] * 2


def test_too_few_hosts_use_up_the_restarts(supervise):
    away = [done() | {"away": "bc", "gives_up": True} for _ in range(9)]
    play = Play(failed(3), *away)
    outcome = supervise(play, max_restarts=2, min_hosts=2).run()
    assert outcome.code == 1 and "b: away; c: away" in outcome.reason and len(play.hosts) == 1


def test_hosts_on_which_the_run_would_be_another_one(supervise):
    away = [done() | {"away": "bc", "gives_up": True} for _ in range(9)]
    outcome = supervise(Play(failed(3), *away), max_restarts=1, min_hosts=1).run()
    assert (outcome.code, outcome.reason) == (1, "one cannot keep the batch")


def test_a_signal_between_two_starts(supervise, monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 30.0)
    events = Events()
    threading.Timer(0.2, lambda: events.put(Event(signal=signal.SIGINT))).start()
    began = time.monotonic()
    with pytest.raises(Interrupted, match="SIGINT"):
        supervise(Play(failed(1)), events, max_restarts=5).run()
    assert time.monotonic() - began < 10


def test_pauses_grow_while_nothing_is_gained(supervise, monkeypatch):
    pauses = []
    monkeypatch.setattr(Supervisor, "_wait", lambda self, seconds: pauses.append(seconds))
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr(restarts, "IDLE_STARTS", 9)
    play = Play(failed(1), *(failed(found=1) for _ in range(8)), done())
    supervise(play, max_restarts=50).run()
    assert pauses == [1, 1, 2, 4, 8, 16, 32, 60, 60]


def test_a_later_launch_writes_beside_an_earlier_one(supervise, tmp_path):
    """As when a job was requeued."""
    (tmp_path / "logs" / "start-7").mkdir(parents=True)
    supervisor = supervise(Play(failed(1), done()), max_restarts=1)
    assert supervisor.run().code == 0
    rows = [json.loads(row) for row in (tmp_path / "logs" / "launch.jsonl").read_text().splitlines()]
    assert [row["start"] for row in rows] == [8, 8, 9, 9]
