"""What each rank of a DeepSpeed engine holds, at every ZeRO stage, and how weights get into the model again.

DeepSpeed's own checkpoints are bound to the layout that wrote them, and are pickles. This reads its optimizers' flat
fp32 tensors by the maps that it keeps itself (`_hp_mapping` at stages 1 and 2, `grad_position` at stage 3: those
behind `deepspeed.utils.safe_get_full_fp32_param`).
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from largetrain.engine.held import MODEL, Held, read, whole_parameters
from largetrain.parallel.pieces import Piece, Pieces


def trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters that the optimizer updates, each once, under its first name."""
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def held_by(engine: Any, stage: int) -> list[Held]:
    """Which ranges of the trained parameters this rank's optimizer updates."""
    named = trained(engine.module)
    if stage == 0:
        return list(whole_parameters(named))
    return list(_of_stage_3(named, engine.optimizer) if stage == 3 else _of_stages_1_and_2(named, engine.optimizer))


def _of_stages_1_and_2(named: list[tuple[str, nn.Parameter]], optimizer: Any) -> Iterator[Held]:
    for name, parameter in named:
        mapping: Any = getattr(parameter, "_hp_mapping", None)
        if mapping is None:  # all of it lies on other ranks
            continue
        owner = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        inside, flat = mapping.lp_fragment_address, mapping.hp_fragment_address
        yield Held(name, tuple(parameter.shape), inside.start, owner, flat.start, flat.numel)


def _of_stage_3(named: list[tuple[str, nn.Parameter]], optimizer: Any) -> Iterator[Held]:
    for name, parameter in named:
        group, offset, padded = optimizer.grad_position[optimizer.get_param_id(parameter)]
        whole: Any = parameter
        start = padded * optimizer._get_param_partition_rank(parameter)
        numel = min(padded, whole.ds_numel - start)  # the last rank's part is padded
        if numel > 0:
            yield Held(name, tuple(whole.ds_shape), start, optimizer.fp32_partitioned_groups_flat[group], offset, numel)


def owners_of(engine: Any, stage: int) -> dict[str, Tensor]:
    """Every trained parameter, and the tensor of this rank's optimizer that its group is in."""
    named, optimizer = trained(engine.module), engine.optimizer
    if stage == 0:
        return dict(named)
    if stage == 3:
        return {
            name: optimizer.fp32_partitioned_groups_flat[optimizer.grad_position[optimizer.get_param_id(p)][0]]
            for name, p in named
        }
    group_of = {id(p): index for index, group in enumerate(optimizer.bit16_groups) for p in group}
    return {name: optimizer.single_partition_of_fp32_groups[group_of[id(p)]] for name, p in named if id(p) in group_of}


def frozen_pieces(module: nn.Module) -> tuple[list[Piece], list[Piece]]:
    """Parameters that nothing updates: those that every rank holds alike, and this rank's ranges of sharded ones."""
    alike, own = [], []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            continue
        if (place := _sharded(parameter)) is not None:
            shape, start, values = place
            if values.numel():
                own.append(Piece(MODEL + name, shape, start, values))
        else:
            alike.append(Piece(MODEL + name, tuple(parameter.shape), 0, parameter.detach().reshape(-1)))
    return alike, own


def restore_frozen(module: nn.Module, pieces: Pieces, names: Collection[str] | None = None) -> None:
    """Fill the parameters that nothing updates, or those of them with these names."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad or (names is not None and name not in names):
            continue
        with torch.no_grad():
            if (place := _sharded(parameter)) is not None:
                shape, start, values = place
                values.copy_(read(pieces, MODEL + name, shape, start, start + values.numel()))
            else:
                parameter.copy_(read(pieces, MODEL + name, tuple(parameter.shape)).view(parameter.shape))


def _sharded(parameter: Any) -> tuple[tuple[int, ...], int, Tensor] | None:
    """Whole shape, first element and this rank's range of a ZeRO-3 parameter; None for any other."""
    if not hasattr(parameter, "ds_id"):
        return None
    part = parameter.ds_tensor
    start = part.ds_numel * dist.get_rank(parameter.ds_process_group)
    return tuple(parameter.ds_shape), start, part.detach().reshape(-1)[: max(0, parameter.ds_numel - start)]


def copy_into_model(engine: Any, stage: int) -> None:
    """Bring changed fp32 masters into the weights that the model computes with; collective."""
    optimizer = engine.optimizer
    if stage in (1, 2):
        optimizer.update_lp_params()
    elif stage == 3:
        optimizer._partition_all_parameters()
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
        optimizer.invalidate_secondary_tensor()
