"""Where the optimizer's tensors lie in the model's parameters, for saving and restoring on any layout.

An optimizer of torch updates whole parameters; ZeRO's updates flat fp32 tensors that hold ranges of many parameters.
`Held` says which range of which parameter lies where, so that weights and moments travel as `Piece`s by name.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from largetrain.errors import CheckpointError
from largetrain.parallel.axes import Axes
from largetrain.parallel.columns import Columns
from largetrain.parallel.pieces import Piece, Pieces, share_out
from largetrain.parallel.shards import shard_of

MODEL, OPTIMIZER, EMA = "model/", "optimizer/", "ema/"
Named = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Tensors of a model by the names of the model that one process would have, whichever part of it this rank has."""


def pairs_of(named: Named) -> list[tuple[str, Any]]:
    """Name and tensor, in the given order."""
    return list(named.items() if isinstance(named, Mapping) else named)


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """Of the parameter as one rank would hold it: neither cut by tensor parallelism nor spread by ZeRO-3."""
    shard = shard_of(parameter)
    return shard.shape if shard is not None else tuple(getattr(parameter, "ds_shape", parameter.shape))


def columns_of(parameter: Tensor) -> Columns | None:
    """Which part of it tensor parallelism gave this rank; None: all of it."""
    shard = shard_of(parameter)
    return shard.columns if shard is not None else None


@dataclass(frozen=True)
class Held:
    """A range of one parameter inside a tensor that the optimizer updates."""

    name: str
    """Of the parameter, as in the model's `state_dict`."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """First element of the range in the flattened parameter, as this rank's tensor-parallel part of it is cut."""
    owner: Tensor
    """What the optimizer updates: the key of its state."""
    offset: int
    """First element of the range in the flattened owner."""
    numel: int
    """Elements of the range."""
    columns: Columns | None = None
    """The part of the whole parameter that tensor parallelism gave this rank; None: all of it."""

    @property
    def stop(self) -> int:
        return self.start + self.numel

    def piece(self, key: str, tensor: Tensor) -> Piece:
        """The same range of a tensor that has the owner's shape."""
        return Piece(key, self.shape, self.start, _range(tensor, self.offset, self.numel), self.columns)

    def read(self, pieces: Pieces, key: str) -> Tensor:
        """The same range of what a checkpoint has under a key.

        Raises:
            CheckpointError: it is not there, or has another shape.
        """
        return read(pieces, key, self.shape, self.start, self.stop, self.columns)

    def fill(self, tensor: Tensor, values: Tensor) -> None:
        """Write the range into a tensor that has the owner's shape."""
        with torch.no_grad():
            if self.numel == tensor.numel():
                tensor.copy_(values.view(tensor.shape))
            else:
                _range(tensor, self.offset, self.numel).copy_(values)


def _range(tensor: Tensor, offset: int, numel: int) -> Tensor:
    """A view; a copy of a tensor whose elements do not lie in their order (channels last)."""
    return tensor.detach().reshape(-1).narrow(0, offset, numel)


def weight_pieces(held: Iterable[Held]) -> list[Piece]:
    """The weights as the optimizer has them: fp32 masters under mixed precision."""
    return [part.piece(MODEL + part.name, part.owner) for part in held]


def optimizer_pieces(held: Iterable[Held], optimizer: torch.optim.Optimizer) -> list[Piece]:
    """What the optimizer keeps for each element of its tensors, such as Adam's two moments."""
    return [
        part.piece(f"{OPTIMIZER}{kind}/{part.name}", value)
        for part in held
        for kind, value in optimizer.state.get(part.owner, {}).items()
        if _by_element(value, part.owner)
    ]


def _by_element(value: Any, owner: Tensor) -> bool:
    return isinstance(value, Tensor) and value.numel() == owner.numel() and (value.ndim > 0 or owner.ndim == 0)


def optimizer_numbers(owners: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the optimizer keeps once per tensor, such as Adam's count of steps, by parameter.

    Args:
        owners: parameter -> the tensor that holds it, or part of it, on this rank.

    Returns:
        {"step": {"dtype": "float32", "all": 7.0}}; "each" by parameter in place of "all" where they differ.
    """
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    dtypes: dict[str, str] = {}
    for name, owner in owners.items():
        for kind, value in optimizer.state.get(owner, {}).items():
            if isinstance(value, Tensor):
                if value.numel() != 1 or _by_element(value, owner):
                    continue
                dtypes[kind], found[kind][name] = str(value.dtype).removeprefix("torch."), value.item()
            elif isinstance(value, int | float):
                dtypes[kind], found[kind][name] = "", value
    numbers: dict[str, Any] = {}
    for kind, by_name in found.items():
        values = set(by_name.values())
        same = len(values) == 1 and len(by_name) == len(owners)
        numbers[kind] = {"dtype": dtypes[kind], **({"all": values.pop()} if same else {"each": by_name})}
    return numbers


def layout_bound(owners: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """What fits neither: tensors of a shape of their own (error feedback, Adafactor's factors), by parameter."""
    bound: dict[str, dict[str, Tensor]] = {}
    seen: set[int] = set()
    for name, owner in owners.items():
        if id(owner) in seen:  # a flat tensor holds many parameters: it is kept under the first
            continue
        seen.add(id(owner))
        odd = {
            kind: value.detach().clone()
            for kind, value in optimizer.state.get(owner, {}).items()
            if isinstance(value, Tensor) and value.numel() != 1 and not _by_element(value, owner)
        }
        if odd:
            bound[name] = odd
    return bound


def restore_weights(held: Iterable[Held], pieces: Pieces) -> None:
    """Fill the optimizer's tensors with weights by name.

    Raises:
        CheckpointError: a parameter is not in the checkpoint, or has another shape there.
    """
    for part in sorted(held, key=lambda part: part.name):  # as they lie in the files, so that the disk reads ahead
        part.fill(part.owner, part.read(pieces, MODEL + part.name))


def read(
    pieces: Pieces,
    key: str,
    shape: tuple[int, ...],
    start: int = 0,
    stop: int | None = None,
    columns: Columns | None = None,
) -> Tensor:
    """A range of a tensor whose whole shape is known, or of some columns of it.

    Raises:
        CheckpointError: it is not there, or has another shape.
    """
    try:
        found = tuple(pieces.shape(key))
    except KeyError as error:
        raise CheckpointError(f"the checkpoint has no {key}, which this model needs") from error
    if found != tuple(shape):
        raise CheckpointError(f"{key} has shape {list(found)} in the checkpoint and {list(shape)} in this model")
    return pieces.read(key, start, stop, columns)


def restore_optimizer(
    held: Sequence[Held],
    owners: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    pieces: Pieces,
    numbers: dict[str, Any],
    bound: dict[str, dict[str, Tensor]],
) -> None:
    """Give the optimizer the state that the checkpoint has for its parameters, whatever layout wrote it.

    Args:
        held: what this rank holds.
        owners: as for `optimizer_numbers`.
        numbers: what that returned when it was saved.
        bound: what `layout_bound` returned on this rank of the same layout; empty on another.
    """
    kinds: dict[str, list[str]] = defaultdict(list)
    for key in pieces.keys():  # noqa: SIM118 (a Pieces is no mapping)
        if key.startswith(OPTIMIZER):
            kind, _, name = key.removeprefix(OPTIMIZER).partition("/")
            kinds[name].append(kind)
    optimizer.state.clear()
    wanted = [(kind, part) for part in held for kind in kinds.get(part.name, ())]
    for kind, part in sorted(wanted, key=lambda one: (one[0], one[1].name)):  # as they lie in the files
        values, state = part.read(pieces, f"{OPTIMIZER}{kind}/{part.name}"), optimizer.state[part.owner]
        if kind not in state:  # padding between parameters stays zero, as it is in the run that wrote this
            state[kind] = torch.zeros_like(part.owner, dtype=values.dtype, requires_grad=False)
        part.fill(state[kind], values)
    for name, owner in owners.items():
        for kind, stored in numbers.items():
            value = stored["all"] if "all" in stored else stored["each"].get(name)
            if value is not None and kind not in optimizer.state[owner]:
                optimizer.state[owner][kind] = _number(value, stored["dtype"], owner, optimizer)
        for kind, tensor in bound.get(name, {}).items():
            optimizer.state[owner][kind] = tensor.to(owner.device)
    for owner in [owner for owner, state in optimizer.state.items() if not state]:
        del optimizer.state[owner]


def _number(value: float, dtype: str, owner: Tensor, optimizer: torch.optim.Optimizer) -> Any:
    """As this optimizer keeps it: DeepSpeed's compiled ones in plain numbers, torch's in tensors.

    Args:
        dtype: of the tensor that it was saved from; empty: it was a plain number.
    """
    if type(optimizer).__module__.startswith("deepspeed.ops."):
        return int(value) if float(value).is_integer() else value
    if not dtype and not isinstance(optimizer, torch.optim.Adam | torch.optim.Adagrad):
        return value
    # fused kernels read the count on the device of the parameters
    fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    kind = getattr(torch, dtype) if dtype else torch.float32
    return torch.tensor(value, dtype=kind, device=owner.device if fused else "cpu")


def whole_parameters(named: Named) -> Iterator[Held]:
    """Every parameter with all elements that its rank has of it, as plain optimizers update them."""
    for name, parameter in pairs_of(named):
        yield Held(name, whole_shape(parameter), 0, parameter, 0, parameter.numel(), columns_of(parameter))


def tied_names(named: Named) -> dict[str, str]:
    """Further names of parameters that a model uses in several places -> the first name, under which they are saved.

    Args:
        named: under all their names (`named_parameters(remove_duplicate=False)`).
    """
    first: dict[int, str] = {}
    every = pairs_of(named)
    for name, parameter in every:
        first.setdefault(id(parameter), name)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def share_of(alike: Sequence[Piece], own: Sequence[Piece], axes: Axes) -> list[Piece]:
    """What this rank writes, so that all ranks together write every tensor once.

    Tensor-parallel parts are written by their own tensor rank; what its ranks hold alike is written by the first.

    Args:
        alike: pieces that all replicas of this rank hold, in the same order.
        own: pieces that no replica holds.
    """
    mine = [*own, *share_out(_ours(alike, axes), axes.replicas.rank, axes.replicas.size)]
    return _ours(mine, axes)


def _ours(pieces: Sequence[Piece], axes: Axes) -> list[Piece]:
    return [piece for piece in pieces if piece.columns is not None or axes.tensor.rank == 0]


def own_part(pieces: Pieces, same_layout: bool) -> dict[str, Any]:
    """What this rank alone can take up again; empty on another layout.

    Raises:
        CheckpointError: the optimizer cannot go on without it.
    """
    if same_layout:
        return pieces.own(dist.get_rank())
    if pieces.shared["layout_bound"]:
        raise CheckpointError(
            "this optimizer keeps state that only the layout which wrote it can use; resume on that layout, or begin "
            "anew from the weights alone with init_from"
        )
    return {}
