"""The composition root: from a resolved run to the objects that run it. The only package that knows all parts."""

from largetrain.compose.checkpoints import AlreadyComplete
from largetrain.compose.run import Run, build, evaluate

__all__ = ["AlreadyComplete", "Run", "build", "evaluate"]
