"""Random numbers: one stream for the initial weights of all ranks, a stream of its own per rank for dropout."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.tiny_run import SEQ_LEN, precision_section, train, write_inputs
from tests.ranks import run_ranks

VOCAB = 257


class DropoutProbe(nn.Module):
    """A small language model that keeps the dropout masks of its last forward pass."""

    masks: list  # of all instances: the ranks are processes of their own

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCAB, 8)
        self.head = nn.Linear(8, VOCAB)
        DropoutProbe.masks = []

    def forward(self, input_ids, labels):
        hidden = self.table(input_ids)
        dropped = nn.functional.dropout(torch.ones_like(hidden), 0.5, self.training)
        if self.training:
            DropoutProbe.masks.append((dropped > 0).detach().clone())
        logits = self.head(hidden * dropped).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
        return loss, (labels != -100).sum()


class SameSamples(torch.utils.data.Dataset):
    """Every sample is the same, so that ranks differ in nothing but their random numbers."""

    def __init__(self, split):
        self.tokens = torch.arange(SEQ_LEN + 1)

    def __len__(self):
        return 64

    def __getitem__(self, sample):
        return {"input_ids": self.tokens[:-1], "labels": self.tokens[1:]}


def masks_of_a_run(folder, steps, resume=None):
    name = "tests.distributed.test_dropout_streams"
    sets = [f"model={{target: '{name}:DropoutProbe', vocab_size: {VOCAB}}}", f"data={{target: '{name}:SameSamples'}}"]
    outcome = train(folder, steps, resume=resume, sets=sets)
    return torch.stack(DropoutProbe.masks), [update["local"] for update in outcome.updates]


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_draw_masks_of_their_own(tmp_path, stage):
    write_inputs(tmp_path, {"zero_optimization": {"stage": stage}}, {"checkpoints": {"every_steps": 2}})
    masks = [result[0] for result in run_ranks(masks_of_a_run, 3, tmp_path, 2)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        agreement = (masks[one] == masks[other]).float().mean().item()
        assert 0.4 < agreement < 0.6  # independent halves agree in half of 4 x 2 x 16 x 8 places
    for mask in masks:
        assert not torch.equal(mask[0], mask[1])  # micro-batches differ as well
        assert 0.4 < mask.float().mean().item() < 0.6


def test_masks_are_the_same_in_every_run_and_go_on_after_resume(tmp_path):
    write_inputs(tmp_path / "a", {}, {"checkpoints": {"every_steps": 2}})
    write_inputs(tmp_path / "b", {}, {"checkpoints": {"every_steps": 2}})
    straight = run_ranks(masks_of_a_run, 2, tmp_path / "a", 4)
    begun = run_ranks(masks_of_a_run, 2, tmp_path / "b", 2)
    resumed = run_ranks(masks_of_a_run, 2, tmp_path / "b", 4, "auto")
    for rank in (0, 1):
        assert torch.equal(straight[rank][0], torch.cat([begun[rank][0], resumed[rank][0]]))


def initial_weights(folder, sets):
    """Whole fp32 weights before the first update, on this rank."""
    import deepspeed

    from largetrain.compose.backend import make_backend
    from largetrain.config.load import load
    from largetrain.config.world import launch_world
    from largetrain.data.build import build_data
    from largetrain.engine.environment import prepare
    from largetrain.parallel.axes import make_axes

    world = launch_world()
    device = prepare(rank=world.rank, local_rank=world.rank, world_size=world.world_size, timeout_s=60, verbose=False)
    resolved = load(str(folder / "engine.json"), str(folder / "run.json"), sets, world_size=world.world_size)
    resolved = resolved.with_steps(3)
    axes = make_axes(resolved.layout)
    backend, _ = make_backend(resolved, build_data(resolved), device, axes, world.local_world_size, lambda line: None)
    dist.barrier()
    parameters = dict(backend.engine.module.named_parameters())
    sharded = [parameter for parameter in parameters.values() if hasattr(parameter, "ds_id")]
    with deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded)):
        return {name: parameter.detach().float().clone() for name, parameter in parameters.items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_initial_weights_agree_between_ranks_and_stages_to_the_bit(tmp_path, precision):
    """ZeRO-3 draws them sharded from the start; a model of 1 rank has the same ones too."""
    write_inputs(tmp_path, precision_section(precision))
    expected = run_ranks(initial_weights, 1, tmp_path, ["zero_optimization.stage=0"])[0]
    assert len({round(float(w.std()), 6) for w in expected.values()}) > 2
    for stage in (0, 1, 2, 3):
        for weights in run_ranks(initial_weights, 2, tmp_path, [f"zero_optimization.stage={stage}"]):
            assert weights.keys() == expected.keys()
            different = [name for name in expected if not torch.equal(weights[name], expected[name])]
            assert not different, (stage, different)


def test_another_seed_gives_other_weights_and_masks(tmp_path):
    write_inputs(tmp_path)
    one = run_ranks(initial_weights, 1, tmp_path, ["seed=1"])[0]
    other = run_ranks(initial_weights, 1, tmp_path, ["seed=2"])[0]
    assert any(not torch.equal(one[name], other[name]) for name in one)
