"""A training step without values: its products, what each waits for, and nothing else.

"Shapes only" runs need no more, so a model of 13 billion weights takes megabytes and a captured graph of thousands of
operations becomes a few hundred parts. Models of two and three layers are captured on PyTorch's meta device. If the
third layer adds the same parts as the second did, so do all further layers; any other model is captured whole.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ps.graph.capture import PRODUCTS, Program, levels_ahead
from ps.graph.products import meta_model, meta_pass
from ps.planning.cost import BYTES
from ps.planning.plans import Level, Shape

FEW_LAYERS = 4  # or fewer: captured whole


@dataclass(frozen=True, slots=True)
class Part:
    """A product, or a slow local operation (`shape` is None), which decides what is submitted together."""

    name: str
    back: tuple[int, ...]  # how many parts before this one those are that it waits for, without implied ones
    shape: Shape | None
    weights: tuple[bool, bool] = (False, False)  # whether the left and the right factor are weights

    def alike(self, other: Part) -> bool:
        return (self.back, self.shape, self.weights) == (other.back, other.shape, other.weights)


@dataclass(frozen=True)
class ShapesProgram:
    """One graph of a step: to the executor, what `ps.graph.capture.Program` is with values."""

    name: str
    parts: tuple[Part, ...]

    @cached_property
    def inputs(self) -> list[list[int]]:
        return [[index - back for back in part.back] for index, part in enumerate(self.parts)]

    @cached_property
    def users(self) -> list[list[int]]:
        users: list[list[int]] = [[] for _ in self.parts]
        for index, inputs in enumerate(self.inputs):
            for needed in inputs:
                users[needed].append(index)
        return users

    @cached_property
    def behind(self) -> list[int]:
        """As `Node.behind`: of a backward pass, the longest chain of products that wait for each part."""
        behind = [0] * len(self.parts)
        if self.name == "backward":
            for index in reversed(range(len(self.parts))):
                later = ((behind[u] + (self.parts[u].shape is not None)) for u in self.users[index])
                behind[index] = max(later, default=0)
        return behind

    def is_critical(self, index: int) -> bool:
        return self.name == "forward" or self.behind[index] > 0

    @cached_property
    def ahead(self) -> tuple[tuple[Level, ...], ...]:
        if self.name != "backward":
            return ()
        products = [part.shape is not None for part in self.parts]
        return levels_ahead(self.inputs, self.behind, products, [part.shape for part in self.parts])

    @cached_property
    def deferred_bytes(self) -> int:
        shapes = [part.shape for i, part in enumerate(self.parts) if part.shape and not self.is_critical(i)]
        return sum(BYTES * shape.batch * shape.inner * (shape.rows + shape.columns) for shape in shapes)

    @property
    def flops(self) -> int:
        return sum(part.shape.flops for part in self.parts if part.shape)


def step_shapes(config: Any, batch: int, sequence: int) -> tuple[list[ShapesProgram], list[torch.Tensor]]:
    """The graphs of one forward and backward pass, and the model's weights, which have shapes and no values."""
    parameters = dict(meta_model(config).named_parameters())
    programs = None
    if config.num_hidden_layers > FEW_LAYERS and _layers_alike(config, parameters):
        two, three = (_captured(config, layers, batch, sequence) for layers in (2, 3))
        programs = deepened(two, three, config.num_hidden_layers)
    if programs is None:
        programs = _captured(config, config.num_hidden_layers, batch, sequence)
    return programs, list(parameters.values())


def deepened(two: Sequence[ShapesProgram], three: Sequence[ShapesProgram], layers: int) -> list[ShapesProgram] | None:
    """The graphs of a model of `layers` layers, from those of two and of three; None if the pattern is not clear."""
    if [program.name for program in two] != [program.name for program in three]:
        return None
    found = [_deepened(a, b, layers) for a, b in zip(two, three, strict=True)]
    return None if None in found else [program for program in found if program is not None]


def _deepened(two: ShapesProgram, three: ShapesProgram, layers: int) -> ShapesProgram | None:
    short, long = two.parts, three.parts
    length = len(long) - len(short)  # parts of a layer
    for begin in range(len(short) + 1):
        if not (_alike(short[begin:], long[begin + length :]) and length > 0):
            continue
        layer = long[begin : begin + length]
        if not _alike(long[:begin], short[:begin]):
            return None
        # the layer before or after the inserted one is like it
        if not (_alike(layer, long[max(0, begin - length) : begin]) or _alike(layer, short[begin : begin + length])):
            return None
        more = [replace(part, name=f"{part.name}@{number}") for number in range(3, layers + 1) for part in layer]
        return ShapesProgram(two.name, (*short[:begin], *more, *short[begin:]))
    return None


def _alike(some: Sequence[Part], others: Sequence[Part]) -> bool:
    return len(some) == len(others) and all(a.alike(b) for a, b in zip(some, others, strict=True))


def _layers_alike(config: Any, parameters: Mapping[str, torch.Tensor]) -> bool:
    """Whether all layers have the same weights, and attention of the same kind."""
    if len(set(getattr(config, "layer_types", None) or ())) > 1:
        return False
    layers: dict[str, Counter[tuple[str, torch.Size]]] = {}
    for name, parameter in parameters.items():
        words = name.split(".")
        numbered = next((at for at, word in enumerate(words) if word.isdigit()), None)
        if numbered is not None:
            layers.setdefault(words[numbered], Counter())[".".join(words[numbered + 1 :]), parameter.shape] += 1
    kinds = list(layers.values())
    return len(kinds) == config.num_hidden_layers and all(kind == kinds[0] for kind in kinds)


def _captured(config: Any, layers: int, batch: int, sequence: int) -> list[ShapesProgram]:
    shallow = copy.deepcopy(config)
    shallow.num_hidden_layers = layers
    if getattr(shallow, "layer_types", None):
        shallow.layer_types = shallow.layer_types[:layers]
    programs: list[ShapesProgram] = []
    weights: set[int] = set()

    def run(program: Program, values: list[Any]) -> Sequence[Any]:
        recorder = _Recorder(program.module, weights)
        result: Sequence[Any] = recorder.run(*values)
        programs.append(reduced(program, recorder.of_weights))
        return result

    model = meta_model(shallow)
    weights.update(storage_of(parameter) for parameter in model.parameters())
    meta_pass(model, batch, sequence, run)
    return programs


class _Recorder(fx.Interpreter):
    """Evaluates a graph on the meta device and notes which factors of products are weights."""

    def __init__(self, module: fx.GraphModule, weights: set[int]) -> None:
        super().__init__(module)
        self._weights = weights
        self.of_weights: dict[fx.Node, tuple[bool, bool]] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and n.target in PRODUCTS:
            arguments, _ = self.fetch_args_kwargs_from_env(n)
            left, right = (storage_of(arguments[at]) in self._weights for at in PRODUCTS[n.target])
            self.of_weights[n] = left, right
        return super().run_node(n)


def storage_of(tensor: torch.Tensor) -> int:
    """An identifier that all views of a tensor share."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata  # a tensor without values has no address


def reduced(program: Program, of_weights: dict[fx.Node, tuple[bool, bool]]) -> ShapesProgram:
    """The program's products and slow local operations; each waits for the nearest others on the way to it."""
    parts: list[Part] = []
    before: list[int] = []  # per part, as bits: all parts that are over before it begins, and itself
    nearest: list[set[int]] = []  # per node: the parts on which its value depends directly
    for node in program.nodes:
        needed = set().union(*(nearest[i] for i in node.inputs))
        implied = 0
        for index in needed:
            implied |= before[index] & ~(1 << index)
        needed = {index for index in needed if not implied >> index & 1}
        shape = node.shape if node.product is not None else None
        if (shape is not None and shape.flops) or node.heavy:
            number = len(parts)
            back = tuple(sorted(number - index for index in needed))
            weights = of_weights.get(node.fx_node, (False, False))
            parts.append(Part(f"{program.name}/{node.fx_node.name}", back, shape, weights))
            before.append(implied | sum(1 << index for index in needed) | 1 << number)
            needed = {number}
        nearest.append(needed)
    return ShapesProgram(program.name, tuple(parts))
