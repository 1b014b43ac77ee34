"""An image run that was stopped and resumed is the run that was never stopped, to the bit; looking changes nothing."""

import json
import shutil

import pytest
import torch
from torch import nn

from largetrain.checkpoint.reader import open_checkpoint
from tests.distributed.tiny_images import SIDE, evaluation_rows, train, training_rows, write_inputs
from tests.distributed.tiny_run import precision_section
from tests.ranks import run_ranks

SAVED, STOPPED = 4, 5
STEPS = 9  # 24 images by 4 or 8: the checkpoint lies within an epoch, the end in a later one
RUN = {
    "checkpoints": {"every_steps": SAVED, "at_end": False},
    "ema": {"decay": 0.9, "every_steps": 2, "warmup_epochs": 0.4},
}


def stop_and_resume(folder, sets):
    """Straight run, stopped run and resumed run, one after the other in the same ranks."""
    straight = train(folder, STEPS, "straight", sets=sets)
    stopped = train(folder, STEPS, "out", sets=sets, stop_after=STOPPED)
    resumed = train(folder, STEPS, "out", resume="auto", sets=sets)
    return straight, stopped, resumed


CASES = [  # every pair of precision x accumulation, precision x statistics
    ("fp32", 1, "off"),
    ("fp32", 2, "on"),
    ("bf16", 1, "on"),
    ("bf16", 2, "off"),
    ("fp16", 1, "on"),
    ("fp16", 2, "off"),
]


def run_cases(folder):
    """One start of the ranks for all cases."""
    return [stop_and_resume(folder / "-".join(map(str, case)), []) for case in CASES]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Folder and (straight, stopped, resumed) of both ranks, of each case."""
    folder = tmp_path_factory.mktemp("resume")
    for precision, accumulation, sync in CASES:
        engine = {"gradient_accumulation_steps": accumulation, **precision_section(precision)}
        write_inputs(folder / f"{precision}-{accumulation}-{sync}", engine, {**RUN, "sync_batch_norm": sync})
    by_case = zip(CASES, *run_ranks(run_cases, 2, folder, timeout=120), strict=True)
    return {case: (folder / "-".join(map(str, case)), ranks) for case, *ranks in by_case}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_resumed_run_equals_the_straight_one_to_the_bit(outcomes, case):
    folder, results = outcomes[case]
    precision, _, sync = case
    for straight, stopped, resumed in results:
        assert [update["step"] for update in straight.updates] == list(range(1, STEPS + 1))
        assert stopped.updates == straight.updates[:STOPPED]
        assert resumed.updates == straight.updates[SAVED:]  # samples, loss, rate, scale and norm of each update
        assert resumed.state == straight.state
    assert training_rows(folder, "out") == training_rows(folder, "straight")
    first, second = (outcome[0] for outcome in results)
    assert set(first.updates[0]["samples"]).isdisjoint(second.updates[0]["samples"])
    assert first.state["random"] != second.state["random"]
    # with plain batch norm each rank has statistics of its own, which come back to it
    assert (first.state["statistics"] == second.state["statistics"]) == (sync == "on")
    for part in ("weights", "optimizer", "schedule", "loss_scale"):
        assert first.state[part] == second.state[part]
    if precision == "fp16":
        assert len({update["scale"] for update in first.updates[SAVED:]}) > 1  # the scaler's count was restored
    checkpoint = open_checkpoint(folder / "out" / "checkpoints" / f"step-{SAVED:08d}")
    assert ["buffers" in checkpoint.own(rank) for rank in (0, 1)] == [sync == "off"] * 2


def resume_with_loaders(folder):
    return *stop_and_resume(folder, ["data.workers=1"]), train(folder, STEPS, "without")


def test_loader_processes_and_a_schedule_of_the_run_continue_too(tmp_path):
    run = {**RUN, "sync_batch_norm": "off", "schedule": {"type": "cosine", "warmup": 0.5}}
    write_inputs(tmp_path, {}, run)
    for straight, stopped, resumed, without in run_ranks(resume_with_loaders, 2, tmp_path, timeout=120):
        assert stopped.updates == straight.updates[:STOPPED]
        assert resumed.updates == straight.updates[SAVED:]
        assert resumed.state == straight.state == without.state
        # the rate moves at every update but the one after the warm-up, which has the peak once more
        assert len({update["lr"] for update in straight.updates}) == STEPS - 1


class HalfFrozen(nn.Module):
    """A net that keeps a part of itself in evaluation mode, as published models with frozen stems do."""

    def __init__(self, num_classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5)).eval()
        self.head = nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * SIDE * SIDE, num_classes))

    def forward(self, images):
        return self.head(self.stem(images))


LOOKS = ["evaluation={every_steps: 1, at_end: true}", "checkpoints={every_steps: 2, best: top1}"]
LOOKED_AT = {
    "synchronised": {"sync_batch_norm": "on"},
    "own statistics": {"sync_batch_norm": "off"},
    "a part in evaluation mode": {"model": {"target": f"{__name__}:HalfFrozen"}},
}


def look_or_not(folder):
    """Each net trained without a look, and with evaluations and checkpoints all along."""
    runs = [(train(folder / n, STEPS, "bare"), train(folder / n, STEPS, "looked", sets=LOOKS)) for n in LOOKED_AT]
    return dict(zip(LOOKED_AT, runs, strict=True))


def test_evaluating_and_saving_leave_training_as_it_is(tmp_path):
    for name, run in LOOKED_AT.items():
        write_inputs(tmp_path / name, {}, {**RUN, "checkpoints": {}, **run})
    for outcomes in run_ranks(look_or_not, 2, tmp_path):
        for name, (bare, looked) in outcomes.items():
            assert looked.updates == bare.updates, name
            del bare.state["counters"], looked.state["counters"]  # the best figure is among them
            assert looked.state == bare.state, name
    assert len(evaluation_rows(tmp_path / "synchronised", "looked")) == STEPS
    assert evaluation_rows(tmp_path / "synchronised", "bare") == []


def resume_changed(folder):
    """A run with a moving average, moving loss scale and statistics of each rank, gone on with in several ways."""
    train(folder, 3, "out")
    found = {}
    for name, sets in CHANGES.items():
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            shutil.copytree(folder / "out", folder / name)
        torch.distributed.barrier()
        found[name] = train(folder, 6, name, resume="auto", sets=sets)
    return found


CHANGES = {
    "as it was": [],
    "a fixed scale": ["fp16={enabled: true, loss_scale: 64}"],
    "another window": ["fp16.loss_scale_window=100"],
    "without average": ["ema=null"],
    "another average": ["ema.decay=0.5"],
}


def test_what_may_change_holds_after_resume(tmp_path):
    """The configuration holds, not what the checkpoint remembers of it."""
    run = {"ema": {"decay": 0.9}, "sync_batch_norm": "off", "checkpoints": {"at_end": True}}
    write_inputs(tmp_path, precision_section("fp16"), run)
    for found in run_ranks(resume_changed, 2, tmp_path):
        scales = {name: [update["scale"] for update in outcome.updates] for name, outcome in found.items()}
        (first, *_, last) = scales["as it was"]
        assert last > first  # a window of 2
        assert scales["a fixed scale"] == [64] * 3
        assert scales["another window"] == [first] * 3
        same = found["as it was"]
        for name in ("without average", "another average"):
            assert found[name].updates == same.updates
            assert found[name].state["statistics"] == same.state["statistics"]
        assert found["another average"].state["average"] != same.state["average"]


RATES = {  # each run begins without any, and goes on with one of these
    "WarmupLR": ["scheduler={type: WarmupLR, params: {warmup_num_steps: 5, warmup_type: linear}}"],
    "OneCycle": ["scheduler={type: OneCycle, params: {cycle_min_lr: 0.001, cycle_max_lr: 0.01}}"],
    "cosine": ["schedule={type: cosine, warmup: 0.5}"],
}
BAD = 2  # the update that is skipped


class Images(torch.utils.data.Dataset):
    """Random images; those with the given ids are not a number."""

    classes = ("a", "b")

    def __init__(self, split, poisoned=()):
        self.poisoned = set(poisoned)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        images = torch.randn(3, SIDE, SIDE) * (torch.nan if index in self.poisoned else 1.0)
        return {"images": images, "labels": torch.tensor(index % 2)}


def change_the_schedule(folder, backend, precision, stage):
    """Rates of resumed runs and of straight ones, with a skipped update before the checkpoint."""
    usual = [f"backend={backend}", "model.args={norm: false}", f"zero_optimization.stage={stage}"]
    usual += [f"{precision}.enabled=true"] if precision != "fp32" else []
    data = "data={target: '" + __name__ + ":Images', args: {poisoned: %s}}"
    clean = train(folder, BAD, "clean", sets=[*usual, data % []])
    usual += [data % [clean.updates[-1]["samples"][0]]]
    found = {}
    for name, sets in RATES.items():
        straight = train(folder, 7, f"{name} straight", sets=[*usual, *sets])
        for before, other in ({"none": []} | RATES).items():
            train(folder, 4, f"{before} then {name}", sets=[*usual, *other])
            resumed = train(folder, 7, f"{before} then {name}", resume="auto", sets=[*usual, *sets])
            found[before, name] = straight.updates, resumed.updates
    return found


@pytest.mark.parametrize(
    ("backend", "precision", "stage"), [("ddp", "fp32", 0), ("deepspeed", "fp32", 0), ("deepspeed", "bf16", 2)]
)
def test_another_schedule_goes_on_at_the_same_update(tmp_path, backend, precision, stage):
    """Those of DeepSpeed and those of the run count otherwise; a skipped update counts for none."""
    write_inputs(tmp_path, {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, {"checkpoints": {"at_end": True}})
    engine = json.loads((tmp_path / "engine.json").read_text())
    del engine["scheduler"]
    (tmp_path / "engine.json").write_text(json.dumps(engine))
    run = json.loads((tmp_path / "run.json").read_text())
    del run["data"]
    (tmp_path / "run.json").write_text(json.dumps(run))
    found = run_ranks(change_the_schedule, 1, tmp_path, backend, precision, stage, timeout=120)[0]
    for names, (straight, resumed) in found.items():
        assert [update["applied"] for update in straight] == [update + 1 != BAD for update in range(7)], names
        assert [update["lr"] for update in resumed] == [update["lr"] for update in straight[4:]], names


def gain_an_average(folder):
    train(folder, 3, "out", sets=["ema=null"])
    return train(folder, 6, "out", resume="auto"), train(folder, 6, "straight", sets=["ema=null"])


def test_a_moving_average_may_be_added(tmp_path):
    run = {"ema": {"decay": 0.9}, "sync_batch_norm": "off", "checkpoints": {"at_end": True}}
    write_inputs(tmp_path, {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}}, run)
    for resumed, straight in run_ranks(gain_an_average, 2, tmp_path):
        assert len(resumed.updates) == 3
        assert resumed.updates[0]["samples"] == straight.updates[3]["samples"]
        assert resumed.state["average"] != straight.state["average"]
