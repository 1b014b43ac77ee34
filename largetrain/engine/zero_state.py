"""What each rank of a DeepSpeed engine holds, at every ZeRO stage, and how weights get into the model again.

DeepSpeed's own checkpoints are bound to the layout that wrote them, and are pickles. This reads its optimizers' flat
fp32 tensors by the maps that it keeps itself (`_hp_mapping` at stages 1 and 2, `grad_position` at stage 3: those
behind `deepspeed.utils.safe_get_full_fp32_param`).
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from largetrain.engine.held import (
    MODEL,
    Held,
    Named,
    columns_of,
    pairs_of,
    read,
    restore_weights,
    whole_parameters,
    whole_shape,
)
from largetrain.parallel.pieces import Piece, Pieces


def trained(named: Named) -> list[tuple[str, Any]]:
    """Parameters that the optimizer updates, of those given; each once, under its first name."""
    return [(name, parameter) for name, parameter in pairs_of(named) if parameter.requires_grad]


def held_by(engine: Any, stage: int, named: Named | None = None) -> list[Held]:
    """Which ranges of the trained parameters this rank's optimizer updates.

    Args:
        named: the parameters by name, each once; None: as the engine's module names them.
    """
    found = _trained_by(engine, named)
    if stage == 0:
        return list(whole_parameters(found))
    return list(_of_stage_3(found, engine.optimizer) if stage == 3 else _of_stages_1_and_2(found, engine.optimizer))


def _trained_by(engine: Any, named: Named | None) -> list[tuple[str, Any]]:
    return trained(engine.module.named_parameters() if named is None else named)


def _of_stages_1_and_2(named: Named, optimizer: Any) -> Iterator[Held]:
    for name, parameter in pairs_of(named):
        mapping: Any = getattr(parameter, "_hp_mapping", None)
        if mapping is None:  # all of it lies on other ranks
            continue
        owner = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        inside, flat = mapping.lp_fragment_address, mapping.hp_fragment_address
        yield Held(name, whole_shape(parameter), inside.start, owner, flat.start, flat.numel, columns_of(parameter))


def _of_stage_3(named: Named, optimizer: Any) -> Iterator[Held]:
    for name, parameter in pairs_of(named):
        group, offset, padded = optimizer.grad_position[optimizer.get_param_id(parameter)]
        whole: Any = parameter
        start = padded * optimizer._get_param_partition_rank(parameter)
        numel = min(padded, whole.ds_numel - start)  # the last rank's part is padded
        if numel > 0:
            owner = optimizer.fp32_partitioned_groups_flat[group]
            yield Held(name, whole_shape(parameter), start, owner, offset, numel, columns_of(parameter))


def owners_of(engine: Any, stage: int, named: Named | None = None) -> dict[str, Tensor]:
    """Every trained parameter, and the tensor of this rank's optimizer that its group is in.

    Args:
        named: as for `held_by`.
    """
    found, optimizer = _trained_by(engine, named), engine.optimizer
    if stage == 0:
        return dict(found)
    if stage == 3:
        return {
            name: optimizer.fp32_partitioned_groups_flat[optimizer.grad_position[optimizer.get_param_id(p)][0]]
            for name, p in found
        }
    group_of = {id(p): index for index, group in enumerate(optimizer.bit16_groups) for p in group}
    return {name: optimizer.single_partition_of_fp32_groups[group_of[id(p)]] for name, p in found if id(p) in group_of}


def frozen_pieces(named: Named) -> tuple[list[Piece], list[Piece]]:
    """Of parameters that nothing updates: those that every replica holds alike, and this rank's ranges of the others.

    Args:
        named: all parameters by name, each once.
    """
    alike: list[Piece] = []
    own: list[Piece] = []
    for name, parameter in pairs_of(named):
        if parameter.requires_grad:
            continue
        start, values = _frozen_part(parameter)
        piece = Piece(MODEL + name, whole_shape(parameter), start, values, columns_of(parameter))
        (own if hasattr(parameter, "ds_id") else alike).append(piece)
    return alike, [piece for piece in own if piece.values.numel()]


def restore_frozen(named: Named, pieces: Pieces, names: Collection[str] | None = None) -> None:
    """Fill the parameters that nothing updates, or those of them with these names."""
    for name, parameter in pairs_of(named):
        if parameter.requires_grad or (names is not None and name not in names):
            continue
        start, values = _frozen_part(parameter)
        stop = start + values.numel()
        stored = read(pieces, MODEL + name, whole_shape(parameter), start, stop, columns_of(parameter))
        with torch.no_grad():
            if hasattr(parameter, "ds_id"):
                values.copy_(stored)
            else:
                parameter.copy_(stored.view(parameter.shape))


def _frozen_part(parameter: Any) -> tuple[int, Tensor]:
    """First element and values, 1-d, of what this rank holds of its tensor-parallel part: ZeRO-3 spreads that."""
    if not hasattr(parameter, "ds_id"):
        return 0, parameter.detach().reshape(-1)
    part = parameter.ds_tensor
    start = part.ds_numel * dist.get_rank(parameter.ds_process_group)
    return start, part.detach().reshape(-1)[: max(0, parameter.ds_numel - start)]


def take_up_weights(
    engine: Any, stage: int, pieces: Pieces, named: Named | None = None, names: Collection[str] | None = None
) -> None:
    """Fill trained weights: those that the optimizer updates, and those that the model computes with; collective.

    Under ZeRO 1 and 2 the latter are gathered from all ranks, which takes gloo as long as reading them several times:
    there every rank reads all of them, and rounds them as the gathering would.

    Args:
        named: as for `held_by`.
        names: those to fill; None: all.

    Raises:
        CheckpointError: a parameter is not in the checkpoint, or has another shape there.
    """
    held = [part for part in held_by(engine, stage, named) if names is None or part.name in names]
    if stage not in (1, 2) or dist.get_backend() != "gloo":
        restore_weights(held, pieces)
        copy_into_model(engine, stage)
        return
    masters = {part.name: part for part in held}
    # as they lie in the files, so that the disk reads ahead
    for part in sorted(whole_parameters(_trained_by(engine, named)), key=lambda part: part.name):
        if names is not None and part.name not in names:
            continue
        values = part.read(pieces, MODEL + part.name)
        part.fill(part.owner, values)
        if (own := masters.get(part.name)) is not None:
            own.fill(own.owner, values[own.start : own.stop])


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
