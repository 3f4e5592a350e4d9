"""Traces models that may drop layers as one graph, if they never do.

Transformers' OPT, BART, Whisper and similar models draw a number before every layer and skip the layer if it is below
`layerdrop`. A branch on a drawn number breaks the graph, although no drawn number is below zero; and at every break all
products of the backward pass must have ended, including the deferred ones. Here the comparison is answered without
reading the number. The number is still drawn, so that dropout then draws the same numbers as in plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Drawn(torch.Tensor):
    """A drawn number, at least zero."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.lt, torch.Tensor.__lt__) and isinstance(args[1], float | int) and args[1] <= 0:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class LayersStay(TorchFunctionMode):
    """Active while a model with `never_drops` runs."""

    def __init__(self) -> None:
        super().__init__()
        self._last = torch.zeros([])  # a graph omits unused numbers, but not tensors that it writes to

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.rand and args and args[0] == [] and not kwargs:
            return self._last.uniform_().clone().as_subclass(_Drawn)
        return func(*args, **(kwargs or {}))


def never_drops(model: torch.nn.Module) -> bool:
    """Whether the model could drop layers, but with probability zero everywhere."""
    chances = [module.layerdrop for module in model.modules() if hasattr(module, "layerdrop")]
    return bool(chances) and all(isinstance(chance, float | int) and chance == 0 for chance in chances)
