"""What is added to the engine JSON before DeepSpeed is handed it, where DeepSpeed 0.19 needs it to train rightly."""

from largetrain.config.document import Document
from largetrain.config.lint import stage_of

ZERO = "zero_optimization"
NEVER = 10**9
"""Updates between lines that no run sees the second of."""


def serve(engine: Document) -> list[str]:
    """Complete the document in place; one note for what changes the run as it was asked for."""
    notes = []
    half = [key for key in ("fp16", "bf16") if engine.get((key, "enabled")) is True]
    if half and stage_of(engine) == 0:
        engine.set((ZERO, "stage"), 1)
        notes.append(
            f"zero_optimization.stage = 1 (stage 0 with {half[0]}: DeepSpeed's stage 0 does not scale the fp16 loss "
            f"and reports no gradient norm; ZeRO-1 makes the same update with less memory)"
        )
    if stage_of(engine) != 0:  # else DeepSpeed refuses ZeRO with most of torch's optimizers
        engine.set(("zero_allow_untested_optimizer",), True)
    if "steps_per_print" not in engine.data:  # progress is largetrain's to report
        engine.set(("steps_per_print",), NEVER)
    return notes
