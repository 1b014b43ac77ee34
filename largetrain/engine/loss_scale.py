"""What moves in DeepSpeed's rule for the loss scale, which both backends follow."""

from typing import Any

# of deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler
MOVING = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def moving_scale(scaler: Any) -> dict[str, Any] | None:
    """What changes from update to update; None without a scale, or for a fixed one."""
    if scaler is None or not scaler.dynamic:
        return None
    return {key: getattr(scaler, key) for key in MOVING}


def restore_scale(scaler: Any, saved: dict[str, Any] | None) -> None:
    """Go on with a saved scale; a fixed one is that of the engine JSON, and so are the rules of a moving one."""
    if scaler is not None and scaler.dynamic and saved is not None:
        vars(scaler).update({key: saved[key] for key in MOVING})
