"""Which modules are batch norms, and which of them keep their statistics whatever happens."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class FrozenStatistics:
    """Mixed into the class of a batch norm: it normalises with its running statistics, also after `model.train()`."""

    def train(self, mode: bool = True):
        """Set the mode of the children (a fused activation), and stay in evaluation mode."""
        super().train(mode)  # type: ignore[misc]
        self.training = False
        return self


def is_batch_norm(module: nn.Module) -> bool:
    """One of torch's batch norms or a subclass, lazy and synchronised ones included."""
    return isinstance(module, _BatchNorm)


def is_frozen(module: nn.Module) -> bool:
    """A batch norm that never computes batch statistics.

    Those are the ones that `freeze_batch_norms` made, and the FrozenBatchNorm2d classes that torchvision, timm and
    others define each for themselves: they share the name alone.
    """
    names = (cls.__name__ for cls in type(module).__mro__)
    return isinstance(module, FrozenStatistics) or any(name.startswith("FrozenBatchNorm") for name in names)


def is_live(module: nn.Module) -> bool:
    """A batch norm that uses the statistics of the batch in training."""
    return is_batch_norm(module) and not is_frozen(module)
