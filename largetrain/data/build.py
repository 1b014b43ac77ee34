"""From a resolved run to its datasets and their order."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from largetrain.config.resolved import Resolved
from largetrain.config.schema import LanguageRun, RunConfig
from largetrain.config.target import check_arguments, load_target
from largetrain.config.vision_schema import ClassificationRun, ImageData, SegmentationRun
from largetrain.data.order import SampleOrder
from largetrain.data.text import prepare
from largetrain.data.tokenize import Progress
from largetrain.errors import ConfigError, on_every_rank

if TYPE_CHECKING:
    from largetrain.data.images import ImageSplits


@dataclass(frozen=True)
class DataInfo:
    """What the rest of the program needs to know about the data."""

    fingerprint: str | None
    """Identifies text samples (content, tokenizer, split, seq_len); None with `data.target`."""
    bytes_per_token: float | None
    """For bits per byte: loss / ln(2) / bytes_per_token; None with `data.target`."""
    total_steps: int
    """Updates of the run."""
    steps_per_epoch: float
    """Updates in one pass over the training data, not rounded."""
    classes: tuple[str, ...]
    """Names of the classes of image data; empty for text."""
    report: tuple[str, ...]
    """Lines for a person."""


@dataclass(frozen=True)
class DataBundle:
    """The datasets of a run; `validation` is None where a `data.target` has none."""

    train: Any
    validation: Any | None
    order: SampleOrder
    info: DataInfo


def build_data(resolved: Resolved, *, is_writer: bool = True, progress: Progress | None = None) -> DataBundle:
    """Prepare and open the data of a run.

    Args:
        resolved: `run`, `batch` and `decoder` are used.
        is_writer: this process may show progress.
        progress: see `prepare`.

    Raises:
        ConfigError: see `prepare`; or a split is shorter than one global batch, or `data.target` is unusable.
    """
    run = resolved.run
    fingerprint: str | None = None
    bytes_per_token: float | None = None
    report: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    train: Any
    validation: Any
    if run.data.target is not None:
        train, validation = _target_split(resolved, "train"), _target_split(resolved, "validation")
        classes = tuple(str(name) for name in getattr(train, "classes", ()))
    elif isinstance(run, LanguageRun):
        if resolved.decoder is None:
            raise ConfigError(
                f"model.target={run.model.target} needs data.target: the built-in text data are cut to the built-in "
                f"decoder's seq_len. Name your own dataset."
            )
        spec = resolved.decoder
        text = prepare(run, spec.seq_len, spec.vocab_size, is_writer=is_writer, progress=progress)
        train, validation = text.train, text.validation
        fingerprint, bytes_per_token, report = text.fingerprint, text.bytes_per_token, text.report
    else:
        images = _images(run)
        train, validation, classes = images.train, images.validation, images.classes
        fingerprint, report = images.fingerprint, images.report
    _check_global_batch(resolved, train)
    repeats = run.data.augment.repeats if isinstance(run, ClassificationRun) else 1
    order = SampleOrder(len(train), resolved.batch.global_batch, run.seed, repeats=repeats)
    steps, length = _total_steps(resolved, order)
    per_epoch = order.samples / order.global_batch
    info = DataInfo(fingerprint, bytes_per_token, steps, per_epoch, classes, (*report, *length))
    return DataBundle(train, validation, order, info)


@on_every_rank()
def _images(run: RunConfig) -> "ImageSplits":
    # here, so that a run on text does not import torchvision
    if isinstance(run, ClassificationRun):
        from largetrain.data.classification import build_classification

        return build_classification(run)
    from largetrain.data.segmentation import build_segmentation

    assert isinstance(run, SegmentationRun), type(run)
    return build_segmentation(run)


def _check_global_batch(resolved: Resolved, train: Any) -> None:
    batch = resolved.batch
    if len(train) >= batch.global_batch:
        return
    tokens = getattr(train, "tokens", None)
    seq_len = getattr(train, "seq_len", None)
    found = f"{len(train)} samples" + (f" ({tokens} tokens at model.seq_len={seq_len})" if tokens is not None else "")
    needed = f"{batch.global_batch} samples" + (f" ({batch.global_batch * seq_len + 1} tokens)" if seq_len else "")
    key = "data.target" if resolved.run.data.target is not None else "data.source"
    lower = ", or lower model.seq_len" if tokens is not None else ""
    where = "the engine JSON" + ("" if isinstance(resolved.run, LanguageRun) else " or the run's engine section")
    raise ConfigError(
        f"{key}: the train split has {found}, but one update needs {needed}: {batch.micro_batch} per rank x "
        f"{batch.gradient_accumulation_steps} accumulation x {batch.data_parallel} data-parallel ranks. "
        f"Add data, lower train_micro_batch_size_per_gpu or gradient_accumulation_steps in {where}{lower}."
    )


def _total_steps(resolved: Resolved, order: SampleOrder) -> tuple[int, tuple[str, ...]]:
    run, steps = resolved.run, resolved.total_steps
    if steps is not None:
        passes = steps * order.global_batch / order.samples
        return steps, (f"{steps} updates of {order.global_batch} samples: {passes:.2f} epochs",)
    assert run.epochs is not None
    steps, dropped = order.steps_for(run.epochs), order.dropped_for(run.epochs)
    if steps == 0:
        raise ConfigError(
            f"epochs={run.epochs:g} of {order.samples} samples is less than one update of {order.global_batch}. "
            f"Raise epochs, or give steps."
        )
    rest = f"; the last {dropped} samples fill no update and are left out" if dropped else ""
    return steps, (f"{run.epochs:g} epochs: {steps} updates of {order.global_batch} samples{rest}",)


def _target_split(resolved: Resolved, split: str) -> Any | None:
    """Build the user's dataset of one split; a validation split may be None."""
    data = resolved.run.data
    name = f"data.target={data.target}"
    assert data.target is not None
    made = load_target(data.target, "data.target")
    args = {**data.args, "split": split}
    check_arguments(made, args, data.target, "data.args")
    dataset = made(**args)
    if dataset is None and split == "validation":
        return None
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(
            f"{name}: {type(dataset).__name__} is not a map-style dataset (__len__ and __getitem__). Iterable datasets "
            f"cannot be resumed or shared out exactly; write the samples to an indexable form first."
        )
    if len(dataset) == 0:
        raise ConfigError(f"{name}: the {split} split is empty (len is 0). Check data.args and the use of `split`.")
    if isinstance(data, ImageData):  # what the loader does about a BadImage of the user's dataset
        for key in ("on_bad_image", "max_bad_images"):
            if key in data.model_fields_set or not hasattr(dataset, key):
                setattr(dataset, key, getattr(data, key))
    item = None if callable(getattr(dataset, "get_batch", None)) else dataset[0]
    if item is not None and not isinstance(item, dict):
        raise ConfigError(
            f"{name}: sample 0 of the {split} split is a {type(item).__name__}, not a dict such as "
            f'{{"input_ids": ..., "labels": ...}}.'
        )
    return dataset
