"""What the choice of the backend means for the engine JSON: refused keys, additions, and notes on idle ones."""

from largetrain.config.combinations import combination_problems
from largetrain.config.ddp_keys import ddp_notes, ddp_problems
from largetrain.config.document import Document
from largetrain.config.honoured import ineffective_keys, refused_keys
from largetrain.config.served import serve


def settle(engine: Document, backend: str, world_size: int) -> tuple[list[str], list[str]]:
    """Check the document for `backend` and complete it, in place.

    Returns:
        problems and notes.
    """
    if backend == "ddp":
        return ddp_problems(engine), ddp_notes(engine)
    problems = refused_keys(engine)
    notes = serve(engine) + ineffective_keys(engine)
    return [*problems, *combination_problems(engine, world_size)], notes
