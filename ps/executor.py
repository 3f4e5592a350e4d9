"""Runs a captured graph: local operations here, products as jobs on the fleet.

Dataflow, not program order: a node runs as soon as its inputs are there, so independent products are under way
together, and nobody waits for a value before it is needed. Values are dropped after their last use.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import fx

from ps.capture import Node, Program, aten
from ps.operands import Operand
from ps.server import Product, Server, ServerError


@dataclass(slots=True)
class Spent:
    """Where the time of the executor's thread went, and what it sent out."""

    products: int = 0
    flops: int = 0
    local_s: float = 0.0
    waiting_s: float = 0.0


class Executor:
    def __init__(self, server: Server) -> None:
        self._server = server
        self.step = 0
        self.spent = Spent()
        self._rehearsing = False

    def rehearse(self, step: Callable[[], object]) -> int:
        """Run a step here, without the fleet, so that its graphs are captured before time counts; its FLOPs."""
        self._rehearsing = True
        try:
            step()
            return self.spent.flops
        finally:
            self._rehearsing = False
            self.spent = Spent()

    @torch.no_grad()
    def run(self, program: Program, inputs: list[Any]) -> Sequence[Any]:
        begun, waited = time.perf_counter(), self.spent.waiting_s
        values: dict[int, Any] = dict(zip(program.placeholders, inputs, strict=True))
        inputs.clear()
        missing = [len(node.inputs) for node in program.nodes]
        uses = [len(users) for users in program.users]
        done: SimpleQueue[int] = SimpleQueue()
        outputs: dict[int, torch.Tensor] = {}  # products under way
        ready = [i for i, count in enumerate(missing) if count == 0 and i not in values]  # sorted, hence a heap
        unfinished = len(program.nodes)

        def finish(index: int) -> None:
            nonlocal unfinished
            unfinished -= 1
            for user in program.users[index]:
                missing[user] -= 1
                if missing[user] == 0:
                    heapq.heappush(ready, user)
            for needed in program.nodes[index].inputs:
                uses[needed] -= 1
                if uses[needed] == 0 and needed != program.output:
                    values.pop(needed, None)

        for index in program.placeholders:
            finish(index)
        while unfinished:
            if ready:
                index = heapq.heappop(ready)
                node = program.nodes[index]
                arguments, keywords = _arguments(program, node.fx_node, values)
                if (
                    node.product is not None
                    and (out := self._submit(program, node, index, arguments, done)) is not None
                ):
                    outputs[index] = out
                    continue
                values[index] = _evaluate(program, node.fx_node, arguments, keywords)
            else:
                index = self._wait(done)
                node = program.nodes[index]
                arguments, keywords = _arguments(program, node.fx_node, values)
                values[index] = _epilogue(node.fx_node.target, outputs.pop(index), arguments, keywords)
            finish(index)
        self.spent.local_s += time.perf_counter() - begun - (self.spent.waiting_s - waited)
        result: Sequence[Any] = values[program.output]
        return result

    def _submit(
        self, program: Program, node: Node, index: int, arguments: Sequence[Any], done: SimpleQueue[int]
    ) -> torch.Tensor | None:
        """Hand the product out; the tensor that will hold it. None: to be computed here, being empty or a rehearsal."""
        assert node.product is not None
        left, right = arguments[node.product[0]], arguments[node.product[1]]
        if left.dtype != torch.float32 or left.device.type != "cpu":
            raise TypeError(f"{node.fx_node.name}: products of {left.dtype} on {left.device} cannot be sent out")
        shape = (*left.shape[:-1], right.shape[-1])
        if 0 in shape or left.shape[-1] == 0:
            return None
        if self._rehearsing:
            self.spent.flops += 2 * math.prod(shape) * left.shape[-1]
            return None
        out = torch.empty(shape)
        product = Product(
            left=Operand(_as_batch(left)),
            right=Operand(_as_batch(right.transpose(-1, -2))),
            out=_as_batch(out),
            done=lambda: done.put(index),
            name=f"{program.name}/{node.fx_node.name}",
            step=self.step,
            urgent=node.urgent,
        )
        self.spent.products += 1
        self.spent.flops += product.shape.flops
        self._server.submit(product)
        return out

    def _wait(self, done: SimpleQueue[int]) -> int:
        begun = time.perf_counter()
        while True:
            try:
                index = done.get(timeout=0.5)  # comes up now and then, so that Ctrl-C is heard
            except Empty:
                index = None
            if self._server.error is not None:
                raise ServerError(f"the server has stopped: {self._server.error!r}")
            if index is not None:
                self.spent.waiting_s += time.perf_counter() - begun
                return index


def _as_batch(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A view as [batch, outer, inner]."""
    array = tensor.detach().numpy()
    return array if array.ndim == 3 else array[None]


def _arguments(program: Program, node: fx.Node, values: dict[int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def value(n: fx.Node) -> Any:
        return values[program.index[n]]

    return fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)


def _evaluate(program: Program, node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    match node.op:
        case "call_function":
            return node.target(*arguments, **keywords)  # type: ignore[operator]
        case "get_attr":
            value: Any = program.module
            for part in str(node.target).split("."):
                value = getattr(value, part)
            return value
        case "output":
            return arguments[0]
    raise NotImplementedError(f"a graph with a node of kind {node.op}: {node.format_node()}")


def _epilogue(
    operation: Any, product: torch.Tensor, arguments: Sequence[Any], keywords: dict[str, Any]
) -> torch.Tensor:
    """What addmm and baddbmm do besides multiplying: beta * input + alpha * product."""
    if operation in (aten.mm.default, aten.bmm.default):
        return product
    alpha, beta = keywords.get("alpha", 1), keywords.get("beta", 1)
    if alpha != 1:
        product.mul_(alpha)
    return product if beta == 0 else product.add_(arguments[0], alpha=beta)
