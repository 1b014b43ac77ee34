"""What a schedule must fulfil beyond the types of its keys; and how its epochs become updates."""

from itertools import pairwise

from largetrain.config.schema import ScheduleConfig

# key -> the types that read it
READ_BY = {"milestones": ("step",), "gamma": ("step",), "power": ("poly",), "final": ("step", "poly", "cosine")}


def updates_of(epochs: float, steps_per_epoch: float) -> int:
    """Epochs as the nearest whole number of updates."""
    return round(epochs * steps_per_epoch)


def schedule_problems(schedule: ScheduleConfig, epochs: float | None = None) -> list[tuple[tuple[str, ...], str]]:
    """Find keys that contradict one another or have no effect.

    A key that no one reads counts only with a value other than its default, so that a run's own printed config, which
    holds every key, can be read again.

    Args:
        schedule: the section.
        epochs: length of the run where it is given in epochs; a warm-up as long is then found here, before the data
            is read (`schedule_factor` finds it in any case).

    Returns:
        (key path below the run, what is wrong and the way out) for each problem.
    """
    problems: list[tuple[tuple[str, ...], str]] = []
    for key, types in READ_BY.items():
        default = ScheduleConfig.model_fields[key].default
        if schedule.type not in types and getattr(schedule, key) != default:
            means = " or ".join(f"`type: {name}`" for name in types)
            problems.append((("schedule", key), f"has no effect with `type: {schedule.type}`; it belongs to {means}."))
    if schedule.type == "step" and not schedule.milestones:
        problems.append((("schedule", "milestones"), "is empty, but `type: step` needs the epochs of its steps."))
    for before, after in pairwise(schedule.milestones):
        if after <= before:
            text = f"must rise, but {after:g} follows {before:g}; write each epoch once, in order."
            problems.append((("schedule", "milestones"), text))
            break
    if schedule.warmup_start and not schedule.warmup:
        problems.append((("schedule", "warmup_start"), "has no effect without `warmup`; give its length in epochs."))
    if epochs is not None and schedule.warmup >= epochs:
        text = f"{schedule.warmup:g} epochs take up the whole run of {epochs:g}; shorten it or train longer."
        problems.append((("schedule", "warmup"), text))
    return problems
