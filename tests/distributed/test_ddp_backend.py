"""Runs of the ddp backend as a whole: unused parameters, lone values, bad losses, best checkpoints, --evaluate."""

import copy
import re

import pytest
import torch
from torch import nn

from largetrain.checkpoint.reader import open_checkpoint
from largetrain.compose import build
from largetrain.config.schema import ParametersConfig
from largetrain.config.world import launch_world
from largetrain.engine.ddp import DdpBackend, UnusedParametersError
from largetrain.engine.ema import Ema
from largetrain.errors import ConfigError, DivergedError
from largetrain.optim.groups import parameter_groups
from largetrain.parallel.sync_batch_norm import convert_sync_batch_norm
from largetrain.tasks.classification import Classification
from tests.checkpoints import weights_of
from tests.distributed.ddp_nets import CLASSES, make_net, samples
from tests.distributed.test_ddp_parity import join
from tests.distributed.tiny_images import (
    SIDE,
    Net,
    evaluate_run,
    evaluation_rows,
    file_digests,
    resolved_for,
    train,
    write_inputs,
)
from tests.distributed.tiny_run import precision_section
from tests.ranks import run_ranks

SWITCHED = "tests.distributed.tiny_images:Switched"
NAMED = r"2 parameters got no gradient on rank {}: extra\.weight, extra\.bias\. .*allow_unused_parameters: true"


# --- parameters without gradient ---


def unused_everywhere(folder):
    with pytest.raises(UnusedParametersError) as caught:
        train(folder, 3, sets=["model.args={used_on: []}"])
    allowed = train(folder, 3, "allowed", sets=["model.args={used_on: []}", "model.allow_unused_parameters=true"])
    one = train(folder, 3, "one", sets=["model.args={used_on: [0]}", "model.allow_unused_parameters=true"])
    return str(caught.value), allowed, one


def test_parameters_that_no_rank_uses_are_named_or_allowed(tmp_path):
    write_inputs(tmp_path, {}, {"model": {"target": SWITCHED}})
    results = run_ranks(unused_everywhere, 2, tmp_path)
    for rank, (message, *_) in enumerate(results):
        assert re.fullmatch(NAMED.format(rank), message)
    for first, second in zip(*(outcomes for _, *outcomes in results), strict=True):
        assert len(first.updates) == 3 and all(update["applied"] for update in first.updates)
        assert first.state["weights"] == second.state["weights"]
    assert results[0][1].state["weights"] != results[0][2].state["weights"]  # the branch was trained where it was used


def test_a_branch_used_on_one_rank_alone_is_named_by_the_other_at_once(tmp_path):
    """The rank that used it waits for the other, which must not wait as well: the harness would say so."""
    write_inputs(tmp_path, {}, {"model": {"target": SWITCHED, "args": {"used_on": [0]}}})
    with pytest.raises(UnusedParametersError, match=NAMED.format(1)) as caught:
        run_ranks(train, 2, tmp_path, 3, timeout=40)
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)


class FirstOnly(Net):
    """Uses a branch in the first of two micro-batches only: its gradients would stay those of each rank."""

    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.extra, self.calls = nn.Linear(8, num_classes), 0
        self.head.register_forward_hook(lambda head, args, out: self._add(args[0], out))

    def _add(self, x, out):
        self.calls += self.training and x.device.type != "meta"
        return out + self.extra(x) if self.calls % 2 else out


def test_a_branch_used_in_an_earlier_micro_batch_alone_is_named_before_it_is_trained(tmp_path):
    engine = {"gradient_accumulation_steps": 2}
    write_inputs(tmp_path, engine, {"model": {"target": f"{__name__}:FirstOnly"}})
    with pytest.raises(UnusedParametersError, match=NAMED.format(r"\d")):
        run_ranks(train, 2, tmp_path, 1, timeout=40)


# --- one value per channel ---


def test_five_images_on_two_ranks_train_through_the_ends_of_epochs(tmp_path):
    """Updates are always whole: the fifth image goes into the next one, no rank is left with a single image."""
    engine = {"zero_optimization": {"stage": 2}, "comms_logger": {"enabled": True}}
    write_inputs(tmp_path, engine, {"model": {"args": {"pooled": True}}}, train=5, validation=5)
    for outcome in run_ranks(train, 2, tmp_path, 5):
        assert [len(update["samples"]) for update in outcome.updates] == [2] * 5
        assert all(update["applied"] for update in outcome.updates)
        for start in (  # each is said once
            "backend: ddp (auto: 3 live batch-norm layers, 89 % of 679 parameters in convolutions)",
            "sync_batch_norm: on (auto: 2 images per rank, fewer than 16)",
            "batch norm: 3 trained layers, 4 (last_norm) to 256 (norm_1) values per channel; statistics synchronised",
            "note: backend ddp: ZeRO stage 2 (",
            "note: backend ddp: without effect: comms_logger.enabled",
        ):
            assert len([line for line in outcome.lines if line.startswith(start)]) == 1, (start, outcome.lines)


def lone_values(folder):
    """One image per rank: synchronised it trains, else the report has said why not and where."""
    synced = train(folder, 3, "synced", sets=["sync_batch_norm=on"])
    lines = []
    resolved = resolved_for(folder, 3, "plain", ["sync_batch_norm=off"])
    built = build(resolved, launch_world(), resume=None, verbose=False, say=lines.append)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        built.trainer.fit()
    return synced, lines


def test_one_value_per_channel_trains_synchronised_and_is_told_otherwise(tmp_path):
    engine = {"train_micro_batch_size_per_gpu": 1}
    write_inputs(tmp_path, engine, {"model": {"args": {"pooled": True}}}, train=5, validation=5)
    for synced, lines in run_ranks(lone_values, 2, tmp_path):
        assert all(update["applied"] for update in synced.updates)
        (line,) = [line for line in lines if "one value per channel" in line]
        assert line.startswith("batch norm: last_norm would get one value per channel, which torch refuses")
        assert "sync_batch_norm: on" in line and "micro-batch" in line


# --- statistics of each rank ---


def test_evaluation_in_the_run_equals_that_of_its_checkpoint_on_any_number_of_ranks(tmp_path):
    run = {
        "sync_batch_norm": "off",
        "ema": {"decay": 0.5},
        "evaluation": {"at_end": True},
        "checkpoints": {"at_end": True},
    }
    write_inputs(tmp_path, {}, run)
    outcomes = run_ranks(train, 2, tmp_path, 6)
    assert outcomes[0].state["statistics"] != outcomes[1].state["statistics"]
    (row,) = evaluation_rows(tmp_path)
    assert {"loss", "top1", "samples", "ema_loss", "ema_top1"} <= row.keys() and row.pop("step") == 6
    before = file_digests(tmp_path / "out")
    for ranks in (1, 2, 3):
        for figures, lines in run_ranks(evaluate_run, ranks, tmp_path):
            assert figures.keys() == row.keys()
            for name, value in figures.items():  # fp32 losses of other micro-batches, added in another order
                assert value == pytest.approx(row[name], rel=1e-6 if "loss" in name else 0, abs=0), (ranks, name)
            assert any(line.startswith("evaluating ") and "step-00000006" in line for line in lines)
    assert file_digests(tmp_path / "out") == before  # it writes nothing

    checkpoint = tmp_path / "out" / "checkpoints" / "step-00000006"
    saved = weights_of(checkpoint)
    bare = Net(3)
    bare.load_state_dict(saved, strict=True)  # no prefix of a wrapper
    own = [open_checkpoint(checkpoint).own(rank)["buffers"][0] for rank in (0, 1)]
    for index, name in enumerate(n for n, b in bare.named_buffers() if b.is_floating_point()):
        assert torch.equal(saved[name], ((own[0][index].double() + own[1][index].double()) / 2).float())
        assert not torch.equal(own[0][index], own[1][index])


# --- a loss that is not finite ---

BAD = 2  # index of the update


def train_with_a_bad_batch(precisions, synchronised, momentum):
    """Body of a rank: state before and after the bad update of rank 1, and whether each update was applied."""
    device, found = join(), {}
    for precision in precisions:
        net = make_net(torch.float32, momentum=momentum)
        if synchronised:
            convert_sync_batch_norm(net, None)
        config = {
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            **precision_section(precision),
        }
        groups = parameter_groups(net, ParametersConfig())
        task = Classification(CLASSES)
        backend = DdpBackend(net, task, config, device, groups, ema=lambda model: Ema(model, 0.5, 1, 0))
        x, labels = samples(40, torch.float32)
        states, applied = [], []
        for update in range(BAD + 2):
            average = {"module": backend.ema.module.state_dict(), **backend.ema.counters()}
            states.append(copy.deepcopy({**net.state_dict(), "average": average}))
            ids = [torch.arange(2) + 8 * update + 4 * micro + 2 * torch.distributed.get_rank() for micro in (0, 1)]
            batches = [{"images": x[i].clone(), "labels": labels[i], "sample_id": i} for i in ids]
            if update == BAD and torch.distributed.get_rank() == 1:
                # of the second micro-batch: the first has moved statistics
                batches[1]["images"][0, 0, 0, 0] = torch.nan
            applied.append(backend.train_step(iter(batches)).applied)
        states.append(copy.deepcopy(net.state_dict()))
        found[precision] = states, applied
    return found


@pytest.mark.parametrize(("synchronised", "momentum"), [(True, 0.1), (False, None)])
def test_a_bad_loss_on_one_rank_leaves_no_trace_on_any(synchronised, momentum):
    """Weights, statistics, counters of batches and moving average, bit by bit; then the run goes on."""
    precisions = ["fp32", "bf16", "fp16"]
    results = run_ranks(train_with_a_bad_batch, 2, precisions, synchronised, momentum)
    for precision in precisions:
        for rank in results:
            states, applied = rank[precision]
            assert applied == [True, True, False, True], precision
            before, after = states[BAD], states[BAD + 1]
            averages = before.pop("average"), after.pop("average")
            assert averages[0].pop("updates") == averages[1].pop("updates") == BAD
            for name, value in before.items():
                assert torch.equal(after[name], value), (precision, name)
            for name, value in averages[0]["module"].items():
                assert torch.equal(averages[1]["module"][name], value), (precision, name)
            assert int(states[-1]["norm_1.num_batches_tracked"]) == 2 * 3  # two micro-batches of three updates
            assert all(bool(value.isfinite().all()) for value in states[-1].values())
            assert not torch.equal(states[-1]["norm_1.running_mean"], before["norm_1.running_mean"])
        weights = [rank[precision][0][-1]["first.weight"] for rank in results]
        assert torch.equal(*weights)


class BadImages(torch.utils.data.Dataset):
    """Images that are not a number; with the classes that the model's outputs are made for."""

    classes = ("a", "b", "c")

    def __init__(self, split):
        self.split = split

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"images": torch.full((3, SIDE, SIDE), torch.nan), "labels": torch.tensor(index % 3)}


def diverge(folder):
    sets = ["guard.max_skipped_in_a_row=3", f"data={{target: '{__name__}:BadImages'}}"]
    try:
        train(folder, 9, sets=sets)
    except DivergedError as error:
        return str(error), error.exit_code
    raise AssertionError("the run was not stopped")


def test_the_guard_stops_after_too_many_in_a_row(tmp_path):
    write_inputs(tmp_path)
    results = run_ranks(diverge, 2, tmp_path)
    assert results[0] == results[1]
    message, code = results[0]
    assert code == 3
    assert message.startswith("step 3: 3 updates in a row were skipped (guard.max_skipped_in_a_row)")
    saved = weights_of(tmp_path / "out" / "checkpoints" / "step-00000003")
    assert all(bool(value.isfinite().all()) for value in saved.values())
    assert float(saved["norm_1.running_mean"].abs().max()) == 0  # as they were built


# --- the best checkpoint ---

STEPS = 7


def best_runs(folder):
    """Two runs that evaluate at each update, what goes on from the best checkpoint, and what is refused."""
    found = {}
    for figure in ("loss", "top1"):
        sets = [f"checkpoints={{best: {figure}, keep_last: 1, every_steps: 1}}", "evaluation.every_steps=1"]
        lines = train(folder, STEPS, figure, sets=sets).lines
        torch.distributed.barrier()
        kept = sorted(path.name for path in (folder / figure / "checkpoints").glob("step-*"))
        best = (folder / figure / "checkpoints" / "best").read_text().strip()
        found[figure] = kept, best, evaluation_rows(folder, figure), evaluate_run(folder, figure, "best")[0], lines
    torch.distributed.barrier()
    found["went on"] = train(folder, STEPS, "loss", resume="best", sets=["checkpoints.best=loss"])
    with pytest.raises(ConfigError) as wrong:
        train(folder, 2, "wrong", sets=["checkpoints.best=top7", "evaluation.at_end=true"])
    with pytest.raises(ConfigError) as random:
        evaluate_run(folder, "nothing", None)
    found["refused"] = [(str(caught.value), caught.value.exit_code) for caught in (wrong, random)]
    return found


def test_the_best_checkpoint_is_kept_evaluated_and_gone_on_from(tmp_path):
    # a rate at which the loss soon rises again
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 3.0}}}
    write_inputs(tmp_path, {}, {"engine": {**sgd, "scheduler": None}})
    found = run_ranks(best_runs, 2, tmp_path)[0]
    for figure, choose in (("loss", min), ("top1", max)):
        kept, best, rows, evaluated, _ = found[figure]
        assert len(rows) == STEPS
        step = choose(rows, key=lambda row: row[figure])["step"]  # the first of equals
        assert 1 <= step < STEPS  # else pruning had nothing to spare
        assert best == f"step-{step:08d}"
        assert kept == [best, f"step-{STEPS:08d}"]
        row = rows[step - 1]
        assert evaluated == pytest.approx({name: row[name] for name in evaluated}, rel=1e-12)
        if figure == "loss":
            assert found["went on"].updates[0]["step"] == step + 1
            assert found["went on"].updates[-1]["step"] == STEPS
    (wrong, code), (random, other) = found["refused"]
    assert code == other == 2
    assert "checkpoints.best: the evaluation gives no 'top7'; it gives loss, top1, samples." in wrong
    assert random.startswith("--evaluate: the model has random weights; add --resume")
    assert not (tmp_path / "nothing").exists()
