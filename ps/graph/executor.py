"""Runs a captured graph: local operations on the server, products as jobs on the fleet.

Dataflow, not program order: a node runs as soon as its inputs are there, and the executor waits for a value only when
it is needed. Values are dropped after their last use.

Products that become ready together go out together and are planned together: m products that share the fleet end about
sqrt(m) times sooner than one after the other, since larger rectangles have less perimeter to download. For the same
reason a product of the backward pass is held back while products with a longer chain of waiting products are in flight.
Weight gradients, which are deferred, go out last, in one group. If the engine can compute them beside the rest
(`early`), they go out with the next critical product, together with the levels still to come, which the engine needs
for that.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
from torch import fx

from ps.graph.capture import Node, Program, aten
from ps.graph.shapes import ShapesProgram
from ps.planning.plans import Level
from ps.transport.jobs import Product
from ps.transport.operands import Operand

SHELF_BYTES = 1 << 30  # limit on operands held for deferred products


class Engine(Protocol):
    """Computes products: the server and its devices, or a model of them."""

    def submit(self, *products: Product, ahead: tuple[Level, ...] = ()) -> None:
        """Submit products that are ready at the same moment. `ahead`: the levels that will be submitted before any
        product waits for the deferred ones."""
        ...

    def forget(self, operands: Sequence[Operand]) -> None: ...

    def collect(self, done: SimpleQueue[int]) -> list[int]:
        """Wait until products have reported to `done`; returns their reports."""
        ...


@dataclass(slots=True)
class Spent:
    """Where the time of the executor's thread went, and what it sent out."""

    products: int = 0
    flops: int = 0
    local_s: float = 0.0
    waiting_s: float = 0.0


class Executor:
    def __init__(self, engine: Engine, early: bool = False) -> None:
        """`early`: deferred products go out beside the others, where that pays."""
        self.engine = engine  # where products go now; see `on`
        self._early = early
        self.step = 0
        self.spent = Spent()
        self._rehearsing = False
        self._weights: set[int] = set()  # storages
        self._uses = 1
        self._kept: dict[tuple[Any, ...], Operand] = {}

    def keep(self, weights: Iterable[torch.Tensor], uses: int) -> None:
        """These weights change only at `weights_changed`, and every product with them runs `uses` times before that."""
        self._weights = {_storage(weight) for weight in weights}
        self._uses = uses

    def weights_changed(self) -> None:
        if self._kept:
            self.engine.forget(list(self._kept.values()))
            self._kept.clear()

    def forget_kept(self) -> None:
        """Drop the kept operands after an aborted step: they are of no use, and the devices that kept them are gone."""
        self._kept.clear()

    @contextmanager
    def on(self, engine: Engine) -> Iterator[None]:
        """Meanwhile products go to this engine, and the figures of the executor's own engine stay unchanged."""
        own, self.engine, spent = self.engine, engine, self.spent
        self.spent = Spent()
        try:
            yield
        finally:
            self.engine, self.spent = own, spent

    def rehearse(self, step: Callable[[], object]) -> int:
        """Run a step without the fleet, so that its graphs are captured before time counts. Returns its FLOPs."""
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
        outputs: dict[int, torch.Tensor] = {}  # of products that wait or are in flight
        waiting: dict[int, Product] = {}  # to go out together
        # local operations that take long come last
        ready = [(node.heavy, i) for i, node in enumerate(program.nodes) if not missing[i] and i not in values]
        heapq.heapify(ready)
        unfinished = len(program.nodes)
        # operands of deferred products that start early are held until the pass ends; and where devices keep slabs of
        # weights from one pass to the next, each device should get the same slabs each time
        early = self._early and self._uses == 1 and program.deferred_bytes <= SHELF_BYTES

        def finish(index: int) -> None:
            nonlocal unfinished
            unfinished -= 1
            for user in program.users[index]:
                missing[user] -= 1
                if missing[user] == 0:
                    heapq.heappush(ready, (program.nodes[user].heavy, user))
            for needed in program.nodes[index].inputs:
                uses[needed] -= 1
                if uses[needed] == 0 and needed != program.output:
                    values.pop(needed, None)

        for index in program.placeholders:
            finish(index)
        while unfinished:
            if not ready or ready[0][0]:
                group, ahead = _next_group(
                    program.behind, program.ahead, waiting, outputs.keys() - waiting.keys(), early
                )
                if group:
                    self.engine.submit(*(waiting.pop(index) for index in group), ahead=ahead)
            if not ready:
                finished = self._collect(done)
                for index in finished:
                    node = program.nodes[index]
                    arguments, keywords = _arguments(program, node.fx_node, values)
                    values[index] = _epilogue(node.fx_node.target, outputs.pop(index), arguments, keywords)
                    finish(index)
                continue
            _, index = heapq.heappop(ready)
            node = program.nodes[index]
            arguments, keywords = _arguments(program, node.fx_node, values)
            if node.product is not None and (made := self._product(program, node, index, arguments, done)) is not None:
                outputs[index], waiting[index] = made
                continue
            values[index] = _evaluate(program, node.fx_node, arguments, keywords)
            finish(index)
        self.spent.local_s += time.perf_counter() - begun - (self.spent.waiting_s - waited)
        result: Sequence[Any] = values[program.output]
        return result

    def run_shapes(self, program: ShapesProgram) -> None:
        """Like `run`, for a graph without values: local operations take no time."""
        missing = [len(part.back) for part in program.parts]
        done: SimpleQueue[int] = SimpleQueue()
        waiting: dict[int, Product] = {}
        in_flight: set[int] = set()
        ready = [(part.shape is None, i) for i, part in enumerate(program.parts) if not missing[i]]
        unfinished = len(program.parts)
        early = self._early and self._uses == 1 and program.deferred_bytes <= SHELF_BYTES

        def finish(index: int) -> None:
            nonlocal unfinished
            unfinished -= 1
            for user in program.users[index]:
                missing[user] -= 1
                if missing[user] == 0:
                    heapq.heappush(ready, (program.parts[user].shape is None, user))

        while unfinished:
            if not ready or ready[0][0]:
                group, ahead = _next_group(program.behind, program.ahead, waiting, in_flight, early)
                in_flight.update(group)
                if group:
                    self.engine.submit(*(waiting.pop(index) for index in group), ahead=ahead)
            if not ready:
                for index in self._collect(done):
                    in_flight.discard(index)
                    finish(index)
                continue
            local, index = heapq.heappop(ready)
            if local:
                finish(index)
            else:
                waiting[index] = self._shape(program, index, done)

    def _shape(self, program: ShapesProgram, index: int, done: SimpleQueue[int]) -> Product:
        part = program.parts[index]
        shape = part.shape
        assert shape is not None
        outer = (shape.rows, shape.columns)
        left, right = (
            self._weight((program.name, index, side), (shape.batch, outer[side], shape.inner), part.weights[side])
            for side in (0, 1)
        )
        out = _no_values((shape.batch, shape.rows, shape.columns))
        self.spent.products += 1
        self.spent.flops += shape.flops
        critical = program.is_critical(index)
        return Product(left, right, out, lambda: done.put(index), part.name, self.step, critical)

    def _weight(self, key: tuple[Any, ...], shape: tuple[int, ...], is_weight: bool) -> Operand:
        """An operand without values; a weight is the same one until it changes."""
        if self._uses == 1 or not is_weight:
            return Operand(_no_values(shape))
        if key not in self._kept:
            self._kept[key] = Operand(_no_values(shape), self._uses)
        return self._kept[key]

    def _product(
        self, program: Program, node: Node, index: int, arguments: Sequence[Any], done: SimpleQueue[int]
    ) -> tuple[torch.Tensor, Product] | None:
        """The product to send out, and the tensor that will hold it. None if the server computes it: it is empty, or
        this is a rehearsal."""
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
        out = torch.empty(shape, device=left.device)
        product = Product(
            left=self._operand(left),
            right=self._operand(right.transpose(-1, -2)),
            out=_as_batch(out),
            done=lambda: done.put(index),
            name=f"{program.name}/{node.fx_node.name}",
            step=self.step,
            critical=node.critical,
        )
        self.spent.products += 1
        self.spent.flops += product.shape.flops
        return out, product

    def _operand(self, tensor: torch.Tensor) -> Operand:
        """A weight is the same operand until it changes, so that devices may keep it."""
        if self._uses == 1 or (storage := _storage(tensor)) not in self._weights:
            return Operand(_as_batch(tensor))
        key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if key not in self._kept:
            self._kept[key] = Operand(_as_batch(tensor), self._uses)
        return self._kept[key]

    def _collect(self, done: SimpleQueue[int]) -> list[int]:
        begun = time.perf_counter()
        finished = self.engine.collect(done)
        self.spent.waiting_s += time.perf_counter() - begun
        return finished


def _next_group(
    behind: Sequence[int],
    ahead: Sequence[tuple[Level, ...]],
    waiting: Mapping[int, Product],
    in_flight: Collection[int],
    early: bool,
) -> tuple[list[int], tuple[Level, ...]]:
    """The products with the longest chain of waiting products, and the levels to come after them. Other products would
    only take devices from these: they wait until their own chain is as long as any other's, or until their operands
    take too much memory. `early`: deferred products go with them, if the levels to come are known."""
    if sum(product.operand_bytes for product in waiting.values()) > SHELF_BYTES:
        return list(waiting), ()
    most = max((behind[index] for index in (*waiting, *in_flight)), default=0)
    group = [index for index in waiting if behind[index] == most]
    to_come = ahead[most] if early and group and most < len(ahead) else ()
    if to_come:
        group += [index for index in waiting if not behind[index]]
    return group, to_come


def _storage(tensor: torch.Tensor) -> int:
    """An identifier that all views of a tensor share."""
    return tensor.untyped_storage().data_ptr()


def _as_batch(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A view as [batch, outer, inner]."""
    array = tensor.detach().numpy()
    return array if array.ndim == 3 else array[None]


def _no_values(shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """An array of this shape that takes no memory."""
    return np.broadcast_to(np.float32(0), shape)


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
    """The part of addmm and baddbmm besides the product: beta * input + alpha * product."""
    if operation in (aten.mm.default, aten.bmm.default):
        return product
    alpha, beta = keywords.get("alpha", 1), keywords.get("beta", 1)
    if alpha != 1:
        product.mul_(alpha)
    return product if beta == 0 else product.add_(arguments[0], alpha=beta)
