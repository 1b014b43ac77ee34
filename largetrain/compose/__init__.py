"""The composition root: from a resolved run to the objects that run it. The only package that knows all parts."""

from largetrain.compose.run import AlreadyComplete, Run, build, evaluate

__all__ = ["AlreadyComplete", "Run", "build", "evaluate"]
