"""The training step as a graph: a torch.compile backend that hands every forward and backward graph to an executor.

AOTAutograd gives functional graphs of aten operations, in which every matrix product appears as mm, addmm, bmm or
baddbmm, forward and backward. A Program is such a graph prepared for running: its dependencies, which nodes are
products, and which products are critical.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from agent.protocol.errors import UserError
from ps.graph.layerdrop import LayersStay, never_drops
from ps.planning.cost import BYTES
from ps.planning.plans import Level, Request, Shape

aten = torch.ops.aten
# operation -> positions of its left and right factor
PRODUCTS: dict[Any, tuple[int, int]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
}
# operations that hide products: they would run on the server unnoticed
OPAQUE = ("scaled_dot_product", "convolution", "_grouped_mm", "addmv", "aten.mv", "linear_backward", "_int_mm")


HEAVY_VALUES = 1 << 22  # a local operation with this many results takes milliseconds


class CaptureError(UserError):
    """The model cannot be distributed as it is; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Node:
    fx_node: fx.Node
    inputs: tuple[int, ...]
    product: tuple[int, int] | None
    critical: bool
    behind: int  # length of the longest chain of backward products that wait for it
    heavy: bool  # a slow local operation: products that are ready go out before it

    @property
    def shape(self) -> Shape | None:
        """Of a product; None if the graph does not say."""
        assert self.product is not None
        left, right = (getattr(self.fx_node.args[at], "meta", {}).get("val") for at in self.product)
        if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
            return None
        *batch, rows, inner = left.shape
        return Shape(int(batch[0]) if batch else 1, int(rows), int(inner), int(right.shape[-1]))


@dataclass(frozen=True)
class Program:
    name: str
    module: fx.GraphModule
    nodes: tuple[Node, ...]
    placeholders: tuple[int, ...]
    users: tuple[tuple[int, ...], ...]
    output: int
    index: dict[fx.Node, int]
    ahead: tuple[tuple[Level, ...], ...] = ()  # of a backward pass: the levels still to come, by `behind`

    @cached_property
    def behind(self) -> list[int]:
        return [node.behind for node in self.nodes]

    @property
    def deferred_bytes(self) -> int:
        """Operand bytes of all deferred products; 0 if unknown."""
        every = self.ahead[-1] if self.ahead else ()
        shapes = [request.shape for level in every for request in level.deferred]
        return sum(BYTES * shape.batch * shape.inner * (shape.rows + shape.columns) for shape in shapes)


Runner = Callable[[Program, list[Any]], Sequence[Any]]


def distribute(model: torch.nn.Module, run: Runner) -> Callable[..., Any]:
    """The same model, with every graph of its training step going through `run`."""
    # More than half of the time that importing PyTorch takes, and only training needs it.
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.exc import BackendCompilerFailed

    # A frame that is compiled too often silently falls back to plain PyTorch, so its products would run on the server.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 512)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    backend = aot_autograd(fw_compiler=_compiler("forward", run), bw_compiler=_compiler("backward", run))
    compiled = torch.compile(model, backend=backend, dynamic=False)
    whole = LayersStay() if never_drops(model) else contextlib.nullcontext()

    def forward(*arguments: Any, **keywords: Any) -> Any:
        try:
            with whole:
                return compiled(*arguments, **keywords)
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, CaptureError):
                raise error.inner_exception from None
            raise

    return forward


def _compiler(name: str, run: Runner) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]]:
    def compile_graph(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        program = prepare(name, module)

        def call(arguments: list[Any]) -> Sequence[Any]:
            values = list(arguments)
            arguments.clear()  # AOTAutograd's convention: the callee owns the inputs and may free them early
            return run(program, values)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    return compile_graph


def prepare(name: str, module: fx.GraphModule) -> Program:
    fx_nodes = list(module.graph.nodes)
    index = {node: i for i, node in enumerate(fx_nodes)}
    inputs = [[index[n] for n in node.all_input_nodes] for node in fx_nodes]
    previous_ordered: int | None = None
    for i, node in enumerate(fx_nodes):
        if node.op != "call_function":
            continue
        if any(word in str(node.target) for word in OPAQUE):
            raise CaptureError(
                f"the model contains {node.target}, which hides matrix products; "
                'load it with attn_implementation="eager" and without convolutions'
            )
        if _writes(node):
            inputs[i] = list(range(i))  # after all nodes that may still read what it writes
        if _draws(node) or _writes(node):
            # random numbers must be drawn in the order in which plain PyTorch draws them
            if previous_ordered is not None and previous_ordered not in inputs[i]:
                inputs[i].append(previous_ordered)
            previous_ordered = i
    users: list[list[int]] = [[] for _ in fx_nodes]
    for i, needed in enumerate(inputs):
        for j in needed:
            users[j].append(i)
    is_product = [node.op == "call_function" and node.target in PRODUCTS for node in fx_nodes]
    behind = [0] * len(fx_nodes)
    for i in reversed(range(len(fx_nodes))):
        behind[i] = max((behind[u] + is_product[u] for u in users[i]), default=0)
    nodes = tuple(
        Node(
            node,
            tuple(inputs[i]),
            PRODUCTS[node.target] if is_product[i] else None,
            critical=name == "forward" or behind[i] > 0,
            behind=behind[i] if name == "backward" else 0,
            heavy=node.op == "call_function" and not is_product[i] and _values(node) >= HEAVY_VALUES,
        )
        for i, node in enumerate(fx_nodes)
    )
    placeholders = tuple(i for i, node in enumerate(fx_nodes) if node.op == "placeholder")
    ahead = _levels_of(nodes) if name == "backward" else ()
    return Program(name, module, nodes, placeholders, tuple(tuple(u) for u in users), len(fx_nodes) - 1, index, ahead)


def _levels_of(nodes: Sequence[Node]) -> tuple[tuple[Level, ...], ...]:
    products = [node.product is not None for node in nodes]
    shapes = [node.shape if node.product is not None else None for node in nodes]
    return levels_ahead([node.inputs for node in nodes], [node.behind for node in nodes], products, shapes)


def levels_ahead(
    inputs: Sequence[Sequence[int]], behind: Sequence[int], products: Sequence[bool], shapes: Sequence[Shape | None]
) -> tuple[tuple[Level, ...], ...]:
    """For every value of `behind`: the levels that come after it. A deferred product is ready with the level after the
    last product that it needs. Empty if the shape of a product is unknown."""
    critical: dict[int, list[Request]] = {}
    deferred: dict[int, list[Request]] = {}
    top = max((behind[i] for i, product in enumerate(products) if product), default=0)
    ready: list[int] = []  # per node: the level with which it is ready
    for number, (needed, product, shape) in enumerate(zip(inputs, products, shapes, strict=True)):
        ready.append(min((behind[i] - 1 if products[i] else ready[i] for i in needed), default=top))
        if not product:
            continue
        if shape is None:
            return ()
        if not shape.flops:
            continue  # an empty product is not sent out
        of = critical if behind[number] else deferred
        of.setdefault(behind[number] or max(0, ready[-1]), []).append(Request(shape))
    levels = [Level(tuple(critical.get(number, ())), tuple(deferred.get(number, ()))) for number in range(top + 1)]
    return tuple(
        tuple(level for level in reversed(levels[:number]) if level.critical or level.deferred)
        for number in range(top + 2)  # including an entry before the first level, with all levels
    )


def _values(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
