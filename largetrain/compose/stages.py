"""From a resolved run to the stages of its pipeline: the list of layers, what each costs, and where it is cut."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from largetrain.compose.model import Say
from largetrain.config.resolved import Resolved
from largetrain.config.schema import LanguageRun
from largetrain.data.build import DataBundle
from largetrain.data.loader import evaluation_batches
from largetrain.engine.deepspeed import dtype_of
from largetrain.engine.partition import LayerCost, bounds_of, layer_costs, memory_of, partition_report
from largetrain.engine.pipeline import Cut, input_of
from largetrain.models.staged import StagedModel, staged_decoder, staged_model
from largetrain.parallel.axes import Axes


def make_stages(
    resolved: Resolved, model: nn.Module | None, data: DataBundle | None, axes: Axes, device: torch.device, say: Say
) -> tuple[StagedModel, Cut]:
    """List the layers and cut them; a collective over all ranks.

    Args:
        model: whole; None: the built-in decoder, whose stages build what they need.
        data: to run a model on that is not the decoder.

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
    costs = _costs(resolved, staged, data if model is not None else None, device)
    bounds = bounds_of(run.parallel.partition, costs, run.parallel.runs)
    memory = memory_of(resolved.engine, batch.gradient_accumulation_steps, layout.data, layout.tensor)
    for line in partition_report(bounds, costs, memory, run.parallel.partition, layout.stages):
        say(line)
    stage = layout.place(dist.get_rank()).stage
    return staged, Cut(layout, bounds, stage in (run.parallel.recompute_stages or ()))


def _costs(resolved: Resolved, staged: StagedModel, data: DataBundle | None, device: torch.device) -> list[LayerCost]:
    """Equal on all ranks: rank 0 looks at the layers, the others are told."""
    found: list[list[LayerCost] | None] = [None]
    if dist.get_rank() == 0:
        timed = resolved.run.parallel.partition == "time"
        # a decoder that is not timed costs neither time nor memory on the meta device
        where = torch.device("meta") if not staged.names and not timed else device
        layers = staged.whole_layers or staged.layers
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            sample, labels = _sample(resolved, data, where)
            found[0] = layer_costs(layers, sample, dtype_of(resolved.engine), timed, labels)
    dist.broadcast_object_list(found, 0)
    assert found[0] is not None
    return found[0]


def _sample(resolved: Resolved, data: DataBundle | None, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Input and labels of one micro-batch: a real one where the data are at hand, since only they know its shape."""
    micro_batch = resolved.batch.micro_batch
    if data is None:
        assert resolved.decoder is not None
        return torch.zeros(micro_batch, resolved.decoder.seq_len, dtype=torch.int64, device=device), None
    batch = next(evaluation_batches(data.train, micro_batch, 1, 0, max_samples=micro_batch))
    labels = batch.get("labels")
    # the layers have not been cast to the run's precision yet
    return input_of(batch, device, torch.float32), labels.to(device) if isinstance(labels, Tensor) else None
