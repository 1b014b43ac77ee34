"""A run goes on with other ranks, another ZeRO stage, offload or backend: same data, same curve to rounding."""

import pytest
import torch

from largetrain.errors import CheckpointError, ConfigError
from tests.distributed.layouts import GLOBAL_BATCH, SAVED, STEPS, Layout, continued, prepare, straight
from tests.distributed.parity.matrix import cpu_adam_is_built
from tests.distributed.tiny_run import SEQ_LEN, train, write_inputs
from tests.ranks import run_ranks
from tests.reference import tolerance_for

# each stage as source and as goal, ranks halved, doubled and made odd, and both backends
CHANGES = [
    (Layout(stage=0, ranks=2), Layout(stage=3, ranks=1)),
    (Layout(stage=1, ranks=1), Layout(stage=2, ranks=2)),
    (Layout(stage=2, ranks=2), Layout(stage=1, ranks=4)),
    (Layout(stage=3, ranks=4), Layout(stage=0, ranks=3)),
    (Layout(stage=3, ranks=3), Layout(stage=3, ranks=2, accumulation=3)),
    (Layout(backend="ddp", ranks=2), Layout(stage=3, ranks=2)),
    (Layout(stage=2, ranks=2), Layout(backend="ddp", ranks=1)),
    # tensor parallel: on, off, and more of it
    (Layout(stage=1, ranks=1), Layout(stage=3, ranks=2, tensor=2)),
    (Layout(stage=3, ranks=4, tensor=2, sequence_parallel=True), Layout(stage=0, ranks=4, tensor=4)),
    (Layout(stage=0, ranks=4, tensor=2), Layout(stage=2, ranks=1)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("topology")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def never_stopped(folder):
    """The run on one rank without ZeRO, which all others equal."""
    return straight(folder, Layout(stage=0, ranks=1))


def check_same_run(found, reference, dtype=torch.float32):
    """Data to the sample; loss, weights and moments to the rounding of sums.

    An update sums the gradients of GLOBAL_BATCH x 16 tokens in another order: see `tolerance_for`.
    """
    assert [update["step"] for update in found.updates] == list(range(1, STEPS + 1))
    assert found.samples == reference.samples
    assert [update["lr"] for update in found.updates] == [update["lr"] for update in reference.updates]
    near = tolerance_for(dtype, terms=GLOBAL_BATCH * SEQ_LEN, updates=STEPS)
    losses, wanted = ([update["loss"] for update in run.updates] for run in (found, reference))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), **near)
    assert found.tensors.keys() == reference.tensors.keys()
    for key, tensor in reference.tensors.items():
        torch.testing.assert_close(found.tensors[key], tensor, **near, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(("first", "second"), CHANGES, ids=str)
def test_a_run_goes_on_on_another_layout(folder, never_stopped, first, second):
    found = continued(folder, first, second)
    check_same_run(found, never_stopped)
    told = "\n".join(found.lines)
    if first.ranks != second.ranks:
        assert f"number of ranks was {first.ranks}, now {second.ranks}" in told
    if first.tensor != second.tensor:
        assert f"parallel.tensor_parallel was {first.tensor}, now {second.tensor}" in told
    assert "up to the rounding of sums" in told
    # what was trained before the change is not trained again
    assert len(found.updates) == STEPS
    assert found.updates[SAVED]["step"] == SAVED + 1


@pytest.mark.skipif(not cpu_adam_is_built(), reason="DeepSpeed's cpu_adam is not compiled (largetrain setup --ops)")
@pytest.mark.parametrize("on_first", [True, False], ids=["on", "off"])
def test_offload_goes_on_and_off(folder, never_stopped, on_first):
    with_offload, without = Layout(stage=2, offload=True), Layout(stage=3)
    cell = (with_offload, without) if on_first else (without, with_offload)
    check_same_run(continued(folder, *cell), never_stopped)


def resume(folder, sets):
    return train(folder, STEPS, "batch", "auto", sets)


def test_another_global_batch_is_refused_with_the_way_to_keep_it(folder):
    layout = Layout(ranks=2)
    run_ranks(train, 2, folder, STEPS, "batch", None, layout.sets, SAVED)
    with pytest.raises(ConfigError) as caught:
        run_ranks(resume, 1, folder, layout.sets)
    assert "global batch was 12, now 6" in caught.value.problems[0]
    assert "--set gradient_accumulation_steps=2" in caught.value.problems[-1]
    sets = [text.replace("accumulation_steps=1", "accumulation_steps=2") for text in layout.sets]
    went_on = run_ranks(resume, 1, folder, sets)[0]
    assert [update["step"] for update in went_on.updates] == list(range(SAVED + 1, STEPS + 1))


MUON = ["optimizer.type=Muon", "optimizer.params={lr: 0.01}", "zero_allow_untested_optimizer=true"]


def test_state_that_only_its_layout_can_use_goes_on_there_and_nowhere_else(tmp_path):
    write_inputs(tmp_path, {}, {"checkpoints": {"every_steps": 2}})
    straight_run = run_ranks(train, 2, tmp_path, 4, "straight", None, MUON)[0]
    run_ranks(train, 2, tmp_path, 4, "out", None, MUON, 2)
    other = [*MUON, "zero_optimization.stage=1"]
    with pytest.raises(CheckpointError, match="only the layout which wrote it can use.*init_from"):
        run_ranks(train, 2, tmp_path, 4, "out", "auto", other)
    resumed = run_ranks(train, 2, tmp_path, 4, "out", "auto", MUON)[0]
    assert resumed.updates == straight_run.updates[2:]
    assert resumed.state == straight_run.state
