"""From a resolved run to the stages of its pipeline: the list of layers, what each costs, and where it is cut."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from largetrain.compose.model import Say
from largetrain.config.resolved import Resolved
from largetrain.config.schema import LanguageRun
from largetrain.engine.deepspeed import dtype_of
from largetrain.engine.partition import LayerCost, bounds_of, layer_costs, memory_of, partition_report
from largetrain.engine.pipeline import Cut
from largetrain.models.staged import StagedModel, staged_decoder, staged_model
from largetrain.parallel.axes import Axes


def make_stages(
    resolved: Resolved, model: nn.Module | None, axes: Axes, device: torch.device, say: Say
) -> tuple[StagedModel, Cut]:
    """List the layers and cut them; a collective over all ranks.

    Args:
        model: whole; None: the built-in decoder, whose stages build what they need.

    Raises:
        ConfigError: the model cannot be cut, or not as `parallel.partition` says.
    """
    run, layout, batch = resolved.run, resolved.layout, resolved.batch
    if model is None:
        assert resolved.decoder is not None
        torch.manual_seed(run.seed)
        staged = staged_decoder(resolved.decoder, axes)
    elif isinstance(run, LanguageRun):
        staged = staged_model(model)
    else:
        from largetrain.models.vision_stages import staged_vision_model  # here: text is spared torchvision

        staged = staged_vision_model(model)
    costs = _costs(resolved, staged, device)
    bounds = bounds_of(run.parallel.partition, costs, layout.stages)
    memory = memory_of(resolved.engine, batch.gradient_accumulation_steps, layout.data, layout.tensor)
    for line in partition_report(bounds, costs, memory, run.parallel.partition):
        say(line)
    stage = layout.place(dist.get_rank()).stage
    return staged, Cut(layout, bounds, stage in (run.parallel.recompute_stages or ()))


def _costs(resolved: Resolved, staged: StagedModel, device: torch.device) -> list[LayerCost]:
    """Equal on all ranks: rank 0 looks at the layers, the others are told."""
    found: list[list[LayerCost] | None] = [None]
    if dist.get_rank() == 0:
        timed = resolved.run.parallel.partition == "time"
        lazy = not staged.names
        # a decoder that is not timed costs neither time nor memory on the meta device
        where = torch.device("meta") if lazy and not timed else device
        layers = staged.whole_layers or staged.layers
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            found[0] = layer_costs(layers, _sample(resolved, where), dtype_of(resolved.engine), timed)
    dist.broadcast_object_list(found, 0)
    assert found[0] is not None
    return found[0]


def _sample(resolved: Resolved, device: torch.device) -> Tensor:
    """Input of one micro-batch."""
    run, micro_batch = resolved.run, resolved.batch.micro_batch
    if isinstance(run, LanguageRun):
        assert run.model.seq_len is not None or resolved.decoder is not None
        seq_len = resolved.decoder.seq_len if resolved.decoder is not None else int(run.model.seq_len or 0)
        return torch.zeros(micro_batch, seq_len, dtype=torch.int64, device=device)
    size = run.data.image_size  # type: ignore[attr-defined]
    return torch.zeros(micro_batch, 3, size, size, device=device)
