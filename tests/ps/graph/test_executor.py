"""Promises of ps.graph.capture and ps.graph.executor: a training step whose products are computed elsewhere, in any
order, is the training step of plain PyTorch.

The fleet is a stand-in without sockets: it computes a product at once, or holds all products back until the executor
can only wait, and then returns the one that the test's order picks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import ps.graph.executor
from ps.graph.capture import CaptureError, Program, distribute, prepare
from ps.graph.executor import Executor
from ps.graph.models import build_model
from ps.planning.plans import Level, Shape
from ps.transport.jobs import Product
from ps.transport.operands import Operand
from ps.transport.server import Server, ServerError

# ---- a fleet without sockets

Order = Callable[[int], int]  # number of products under way -> which of them, in the order of submission, finishes next

ORDERS: dict[str, Order | None] = {
    "at once": None,
    "first come first served": lambda count: 0,
    "reversed": lambda count: count - 1,
    "random": random.Random(7).randrange,
}


class Fleet:
    """An engine that computes here."""

    def __init__(self, order: Order | None) -> None:
        self.groups: list[list[Product]] = []  # products that were submitted together
        self.aheads: list[tuple[Level, ...]] = []  # the levels announced with each group
        self.under_way: list[Product] = []
        self.moments: list[list[Product]] = []  # products under way each time the executor began to wait
        self.forgotten: list[list[Operand]] = []
        self._order = order

    @property
    def submitted(self) -> list[Product]:
        return [product for group in self.groups for product in group]

    def submit(self, *products: Product, ahead: tuple[Level, ...] = ()) -> None:
        self.groups.append(list(products))
        self.aheads.append(ahead)
        for product in products:
            if self._order is None:
                compute(product)
                product.done()
            else:
                self.under_way.append(product)

    def forget(self, operands: Sequence[Operand]) -> None:
        assert not self.under_way, "an operand changes while a product that uses it is under way"
        self.forgotten.append(list(operands))

    def collect(self, done: SimpleQueue[int]) -> list[int]:
        if self._order is not None:
            self.moments.append(list(self.under_way))
            product = self.under_way.pop(self._order(len(self.under_way)))
            compute(product)
            product.done()
        assert not done.empty(), "the executor waits, and nothing is under way"
        return [done.get()]


def shapes(products: Iterable[Product]) -> Counter[Shape]:
    return Counter(product.shape for product in products)


def compute(product: Product) -> None:
    np.matmul(product.left.array, product.right.array.transpose(0, 2, 1), out=product.out)


class Walker(Executor):
    """The executor, and the fleet that computes its products."""

    def __init__(self, fleet: Fleet, early: bool = False) -> None:
        super().__init__(fleet, early)
        self.fleet = fleet
        self.graphs: list[list[list[Product]]] = []  # products that each graph submitted, group by group

    def run(self, program: Program, inputs: list[Any]) -> Sequence[Any]:
        before = len(self.fleet.groups)
        result = super().run(program, inputs)
        self.graphs.append(self.fleet.groups[before:])
        return result


# ---- training steps of small models

# Every size is different, so that its shape identifies a product: 14 tokens, 16 hidden, 29 words ...
TOKENS = torch.randint(0, 29, (2, 7), generator=torch.Generator().manual_seed(0))
FAMILIES: dict[str, Callable[[], Any]] = {
    "opt": lambda: transformers.OPTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=36, word_embed_proj_dim=16, vocab_size=29
    ),
    "llama": lambda: transformers.LlamaConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        vocab_size=29,
        attention_dropout=0.1,
    ),
    "bloom": lambda: transformers.BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=29),
}
LINEAR_LAYERS = {"opt": 2 * 6 + 1, "llama": 2 * 7 + 1, "bloom": 4 + 1}


@dataclass
class Step:
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    generator: torch.Tensor  # state of the random generator afterwards


@dataclass
class Family:
    """A model, and the same model distributed. Captured once; `walker` runs the captured graphs and can be replaced."""

    name: str
    model: torch.nn.Module
    forward: Callable[..., Any] = field(init=False)
    walker: Walker = field(init=False)

    def __post_init__(self) -> None:
        self.forward = distribute(self.model, lambda program, inputs: self.walker.run(program, inputs))

    def plain(self, seed: int = 1) -> Step:
        return self._step(self.model, seed)

    def distributed(self, order: Order | None = None, seed: int = 1, early: bool = False) -> tuple[Step, Walker]:
        self.walker = Walker(Fleet(order), early)
        return self._step(self.forward, seed), self.walker

    def _step(self, forward: Callable[..., Any], seed: int) -> Step:
        torch.manual_seed(seed)
        self.model.zero_grad()
        loss = forward(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        assert len(gradients) == len(list(self.model.parameters()))
        return Step(loss.detach(), gradients, torch.get_rng_state())


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Products this small only get slower when threads share them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    config = FAMILIES[request.param]()
    config.use_cache = False
    torch.manual_seed(0)
    model = build_model(config)
    model.train()
    yield Family(request.param, model)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_losses_and_gradients_are_those_of_plain_pytorch(family: Family, order: str) -> None:
    plain, (distributed, _) = family.plain(), family.distributed(ORDERS[order])
    torch.testing.assert_close(distributed.loss, plain.loss, rtol=1e-6, atol=1e-6)
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(distributed.gradients[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.slow
def test_the_order_in_which_products_finish_changes_no_bit(family: Family) -> None:
    first, _ = family.distributed(ORDERS["at once"])
    for order in ("reversed", "random"):
        other, _ = family.distributed(ORDERS[order])
        assert torch.equal(other.loss, first.loss)
        assert all(torch.equal(other.gradients[name], first.gradients[name]) for name in first.gradients)


def test_dropout_draws_the_numbers_that_plain_pytorch_draws(family: Family) -> None:
    losses = []
    for seed in (1, 2):
        plain, (distributed, _) = family.plain(seed), family.distributed(ORDERS["reversed"], seed)
        torch.testing.assert_close(distributed.loss, plain.loss, rtol=1e-6, atol=1e-6)
        assert torch.equal(distributed.generator, plain.generator)
        losses.append(plain.loss.item())
    if family.name != "bloom":  # has no dropout by default
        assert losses[0] != losses[1], "nothing was dropped"


def test_q_k_and_v_are_under_way_together(family: Family) -> None:
    _, walker = family.distributed(ORDERS["first come first served"])

    def together(moment: list[Product]) -> int:
        """The most products of the forward pass that share their left operand: q, k and v of one layer."""
        lefts = [p.left.array.__array_interface__["data"][0] for p in moment if p.name.startswith("forward/")]
        return max((lefts.count(left) for left in lefts), default=0)

    fused = family.name == "bloom"  # q, k and v are one product there
    assert max(map(together, walker.fleet.moments)) == (1 if fused else 3)


@pytest.mark.parametrize("family", ["opt"], indirect=True)  # q, k and v have the same shape there: 16 from 16
@pytest.mark.parametrize("order", ["first come first served", "reversed", "random"])
def test_a_gradient_that_is_ready_early_waits_for_its_siblings(family: Family, order: str) -> None:
    """The gradient of v is ready two products sooner than those of q and k, but is not needed sooner."""
    _, walker = family.distributed(ORDERS[order])
    of_inputs = Shape(1, TOKENS.numel(), 16, 16)
    backward = [group for group in walker.fleet.groups if group[0].name.startswith("backward/")]
    counts = [sum(p.shape == of_inputs for p in group) for group in backward]
    assert [count for count in counts if count] == [1, 3, 1, 3], "the output's, then q, k and v of each layer"


def test_a_model_is_one_graph_each_way(family: Family) -> None:
    """A break would end all products of the backward pass there, even deferred weight gradients."""
    _, walker = family.distributed()
    assert [groups[0][0].name.split("/")[0] for groups in walker.graphs] == ["forward", "backward"]


@pytest.mark.slow
def test_a_model_that_drops_layers_trains_like_plain_pytorch() -> None:
    config = FAMILIES["opt"]()
    config.use_cache, config.layerdrop, config.num_hidden_layers = False, 0.5, 4
    torch.manual_seed(0)
    model = build_model(config)
    model.train()
    family = Family("opt", model)
    for seed in range(3):
        torch.manual_seed(seed)
        plain = model(input_ids=TOKENS, labels=TOKENS).loss
        after = torch.get_rng_state()
        family.walker = Walker(Fleet(None))
        torch.manual_seed(seed)
        distributed = family.forward(input_ids=TOKENS, labels=TOKENS).loss
        torch.testing.assert_close(distributed, plain, rtol=1e-6, atol=1e-6)
        assert torch.equal(torch.get_rng_state(), after)
    torch._dynamo.reset()


def test_weight_gradients_are_deferred_and_delay_no_other_product(family: Family) -> None:
    """No product needs them before the optimizer runs, so a fleet may compute them last."""
    family.walker = Walker(Fleet(lambda count: 0))

    def critical_first(count: int) -> int:
        under_way = family.walker.fleet.under_way
        return next((i for i, p in enumerate(under_way) if p.critical), 0)

    _, walker = family.distributed(critical_first)
    weights = [p for p in walker.fleet.submitted if p.shape.inner == TOKENS.numel() and p.shape.batch == 1]
    assert len(weights) == LINEAR_LAYERS[family.name]
    assert not any(p.critical for p in weights)
    assert all(p.name.startswith("backward/") for p in weights)
    for groups in walker.graphs:
        kinds = [[p.critical for p in group] for group in groups]
        assert all(all(group) for group in kinds[:-1]), "deferred products go out together, after all critical ones"
    waited_with_critical = [m for m in walker.fleet.moments if any(p.critical for p in m)]
    assert all(p.critical for moment in waited_with_critical for p in moment)


def test_early_weight_gradients_go_out_at_once_and_the_levels_ahead_are_announced(family: Family) -> None:
    plain, (step, walker) = family.plain(), family.distributed(lambda count: 0, early=True)
    torch.testing.assert_close(step.loss, plain.loss, rtol=1e-6, atol=1e-6)
    aheads = iter(walker.fleet.aheads)
    early = 0
    for groups in walker.graphs:
        for number, group in enumerate(groups):
            told = next(aheads)
            critical = [p for p in group if p.critical]
            if not told:
                continue
            assert critical, "early products go out only beside a critical one"
            early += len(group) - len(critical)
            later = [p for group in groups[number + 1 :] for p in group]
            assert Counter(r.shape for level in told for r in level.critical) == shapes(p for p in later if p.critical)
            assert Counter(r.shape for level in told for r in level.deferred) == shapes(
                p for p in later if not p.critical
            )
    assert early >= LINEAR_LAYERS[family.name] // 2


def test_weight_gradients_wait_if_they_need_too_much_memory_or_weights_are_kept(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = family.distributed(early=True)[1].fleet
    together = sum(p.operand_bytes for p in fleet.submitted if not p.critical)
    assert any(fleet.aheads)
    monkeypatch.setattr("ps.graph.executor.SHELF_BYTES", together - 1)
    assert not any(family.distributed(early=True)[1].fleet.aheads)
    monkeypatch.setattr("ps.graph.executor.SHELF_BYTES", together)
    assert any(family.distributed(early=True)[1].fleet.aheads)
    family.walker = walker = Walker(Fleet(None), early=True)
    walker.keep(family.model.parameters(), uses=2)
    family._step(family.forward, seed=1)
    assert not any(walker.fleet.aheads)


def test_weight_gradients_that_need_too_much_memory_go_out_earlier_and_delay_no_other_product(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products that wait for the end of the step occupy the server's memory."""
    monkeypatch.setattr("ps.graph.executor.SHELF_BYTES", 0)
    family.walker = Walker(Fleet(lambda count: 0))

    def critical_first(count: int) -> int:
        under_way = family.walker.fleet.under_way
        return next((i for i, p in enumerate(under_way) if p.critical), 0)

    plain, (step, walker) = family.plain(), family.distributed(critical_first)
    waited_with_critical = [m for m in walker.fleet.moments if any(p.critical for p in m)]
    assert max(sum(not p.critical for p in moment) for moment in waited_with_critical) >= 4
    torch.testing.assert_close(step.loss, plain.loss, rtol=1e-6, atol=1e-6)


def test_a_product_that_leads_to_another_is_critical(family: Family) -> None:
    _, walker = family.distributed()
    assert all(p.critical for p in walker.fleet.submitted if p.name.startswith("forward/"))
    assert any(p.critical for p in walker.fleet.submitted if p.name.startswith("backward/"))


def test_the_flops_sent_out_are_the_flops_of_the_step(family: Family) -> None:
    with FlopCounterMode(display=False) as counter:
        family.plain()
    _, walker = family.distributed()
    assert walker.spent.flops == sum(p.shape.flops for p in walker.fleet.submitted) == counter.get_total_flops()
    assert walker.spent.products == len(walker.fleet.submitted)


def test_a_rehearsal_counts_the_flops_and_sends_nothing_out(family: Family) -> None:
    _, walker = family.distributed()
    family.walker = Walker(Fleet(None))
    flops = family.walker.rehearse(lambda: family._step(family.forward, seed=1))
    assert flops == walker.spent.flops > 0
    assert family.walker.fleet.submitted == []
    assert (family.walker.spent.flops, family.walker.spent.products) == (0, 0)


# ---- single graphs


def run(function: Callable[..., Any], *inputs: torch.Tensor, order: Order | None = lambda count: 0) -> Any:
    """Result of the executor for a function's graph."""
    return Walker(Fleet(order)).run(captured(function, *inputs), list(inputs))


def captured(function: Callable[..., Any], *inputs: torch.Tensor) -> Program:
    return prepare("forward", make_fx(function)(*(x.clone() for x in inputs)))


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


aten = torch.ops.aten


@pytest.mark.parametrize("alpha", [1, 0.5])
@pytest.mark.parametrize("beta", [1, -2, 0])
def test_a_bias_is_added_with_its_factors(alpha: float, beta: float) -> None:
    def flat(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> Any:
        return aten.addmm(bias, left, right, alpha=alpha, beta=beta)

    def batched(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> Any:
        return aten.baddbmm(bias, left, right, alpha=alpha, beta=beta)

    for function, inputs in (
        (flat, (numbers(4), numbers(3, 5), numbers(5, 4))),
        (flat, (numbers(3, 1), numbers(3, 5), numbers(5, 4))),
        (batched, (numbers(2, 1, 4), numbers(2, 3, 5), numbers(2, 5, 4))),
    ):
        torch.testing.assert_close(run(function, *inputs), function(*inputs))


def test_a_bias_with_factor_zero_is_not_read() -> None:
    bias = torch.full((4,), float("nan"))
    product = run(lambda b, x, y: aten.addmm(b, x, y, beta=0), bias, numbers(3, 5), numbers(5, 4))
    assert not product.isnan().any()


@pytest.mark.parametrize(
    "lay",
    [
        lambda x: x,
        lambda x: x.mT.contiguous().mT,
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
        lambda x: x[..., :1, :].expand(x.shape),
        lambda x: x[..., :1].expand(x.shape),
        lambda x: x[:1].expand(x.shape),
    ],
    ids=["plain", "transposed", "strided", "one row repeated", "one column repeated", "one product repeated"],
)
def test_operands_are_multiplied_in_any_memory_layout(lay: Callable[[torch.Tensor], torch.Tensor]) -> None:
    left, right = lay(numbers(3, 4, 5)), lay(numbers(3, 5, 6))
    torch.testing.assert_close(run(torch.bmm, left, right), torch.bmm(left, right))


def test_a_value_is_not_overwritten_while_a_product_that_uses_it_is_under_way() -> None:
    def function(left: torch.Tensor, right: torch.Tensor) -> Any:
        product = left @ right
        left.add_(1000)
        return product, left.sum()

    left, right = numbers(3, 5), numbers(5, 4)
    product, total = run(function, left.clone(), right)
    torch.testing.assert_close(product, left @ right)
    torch.testing.assert_close(total, (left + 1000).sum())


@pytest.mark.parametrize(
    "draw",
    [torch.rand_like, torch.bernoulli, functional.dropout, lambda x: aten.native_dropout(x, 0.5, True)[0]],
    ids=["rand_like", "bernoulli", "dropout", "native_dropout"],
)
def test_random_numbers_are_drawn_in_the_order_of_the_program(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The second draw needs no product and could run before the first, which does."""

    def function(left: torch.Tensor, right: torch.Tensor) -> Any:
        return draw((left @ right).sigmoid()), draw(left.sigmoid())

    inputs = numbers(9, 5), numbers(5, 9)
    program = captured(function, *inputs)
    torch.manual_seed(3)
    plain = function(*inputs)
    torch.manual_seed(3)
    distributed = Walker(Fleet(lambda count: 0)).run(program, list(inputs))
    for one, two in zip(distributed, plain, strict=True):
        torch.testing.assert_close(one, two)


def test_independent_products_are_all_under_way_before_the_executor_waits_for_the_first() -> None:
    walker = Walker(Fleet(lambda count: 0))

    def function(x: torch.Tensor) -> Any:
        return [(x * i) @ x for i in range(10)]

    walker.run(captured(function, numbers(4, 4)), [numbers(4, 4)])
    assert [len(moment) for moment in walker.fleet.moments] == list(range(10, 0, -1))


def test_an_empty_product_is_not_sent_out() -> None:
    walker, inputs = Walker(Fleet(None)), [torch.ones(0, 5), torch.ones(5, 4)]
    result: Any = walker.run(captured(torch.mm, *inputs), inputs)
    assert result.shape == (0, 4)
    assert walker.fleet.submitted == []


def test_a_product_over_an_inner_length_of_zero_is_zero() -> None:
    assert torch.equal(run(torch.mm, torch.ones(3, 0), torch.ones(0, 4)), torch.zeros(3, 4))


# ---- errors


class HiddenAttention(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x, x).sum()


def test_attention_that_hides_its_products_is_refused_with_advice() -> None:
    forward = distribute(HiddenAttention(), Walker(Fleet(None)).run)
    with pytest.raises(CaptureError, match=r'scaled_dot_product.*attn_implementation="eager"'):
        forward(numbers(2, 2, 7, 8).requires_grad_())


def test_a_product_of_another_type_than_float32_is_refused() -> None:
    with pytest.raises(TypeError, match=r"mm: products of torch\.float64 on cpu cannot be sent out"):
        run(torch.mm, numbers(3, 5).double(), numbers(5, 4).double())


def test_a_server_that_has_stopped_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products are reported as done, without a result."""
    server = Server()
    try:

        def break_down() -> None:
            raise OSError("out of sockets")

        monkeypatch.setattr(server, "turn", break_down)
        server.start()
        with pytest.raises(ServerError, match=r"the server has stopped.*out of sockets"):
            Executor(server).run(captured(torch.mm, numbers(3, 5), numbers(5, 4)), [numbers(3, 5), numbers(5, 4)])
    finally:
        server.stop()


# ---- products that are ready together go out together


def test_q_k_and_v_of_a_layer_are_submitted_together(family: Family) -> None:
    """Products planned together share the fleet."""
    _, walker = family.distributed(ORDERS["first come first served"])
    forward = [group for group in walker.fleet.groups if group[0].name.startswith("forward/")]

    def share_their_left(group: list[Product]) -> bool:
        return len(group) == 3 and len({p.left.array.__array_interface__["data"][0] for p in group}) == 1

    fused = family.name == "bloom"  # q, k and v are one product there
    assert sum(map(share_their_left, forward)) == (0 if fused else 2)  # one per layer


def test_independent_products_are_one_group() -> None:
    walker = Walker(Fleet(lambda count: 0))
    walker.run(captured(lambda x: [(x * i) @ x for i in range(10)], numbers(4, 4)), [numbers(4, 4)])
    assert [len(group) for group in walker.fleet.groups] == [10]


def test_products_go_out_before_slow_local_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fleet computes while the server does; quick local operations do not delay a group."""
    monkeypatch.setattr("ps.graph.capture.HEAVY_VALUES", 1000)
    events: list[str] = []
    evaluate = ps.graph.executor._evaluate

    def watched(program: Program, node: torch.fx.Node, *rest: Any) -> Any:
        events.append(node.name)
        return evaluate(program, node, *rest)

    class Watched(Fleet):
        def submit(self, *products: Product, ahead: tuple[Level, ...] = ()) -> None:
            events.append(f"{len(products)} products")
            super().submit(*products, ahead=ahead)

    def function(x: torch.Tensor) -> Any:
        return x.repeat(10, 10).sin(), x @ x, x.cos() @ x

    monkeypatch.setattr(ps.graph.executor, "_evaluate", watched)
    walker = Walker(Watched(lambda count: 0))
    walker.run(captured(function, numbers(4, 4)), [numbers(4, 4)])
    assert [e for e in events if e in ("cos", "2 products", "sin")] == ["cos", "2 products", "sin"]


def test_an_idle_fleet_gets_deferred_products_while_the_server_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ps.graph.capture.HEAVY_VALUES", 1000)

    def function(x: torch.Tensor) -> Any:
        return x.cos() @ x, x.repeat(10, 10).sin()[:4, :4] @ x @ x  # the first product is deferred

    x = numbers(4, 4)
    walker = Walker(Fleet(lambda count: 0))
    program = prepare("backward", make_fx(function)(x))
    one, two = walker.run(program, [x])
    assert [[p.critical for p in group] for group in walker.fleet.groups] == [[False], [True], [False]]
    for result, expected in zip((one, two), function(x), strict=True):
        torch.testing.assert_close(result, expected)


# ---- weights that devices may keep


def two_parts(family: Family, uses: int) -> tuple[Walker, list[Product], list[Product]]:
    """Two micro-batches between which no weight changes, and the products of each."""
    family.walker = walker = Walker(Fleet(None))
    walker.keep(family.model.parameters(), uses)
    family._step(family.forward, seed=1)
    first = walker.fleet.submitted
    family._step(family.forward, seed=1)
    return walker, first, walker.fleet.submitted[len(first) :]


def operands(products: list[Product]) -> list[Operand]:
    return [operand for product in products for operand in (product.left, product.right)]


def test_a_weight_keeps_its_operand_id_until_it_changes_and_an_activation_gets_a_new_one(family: Family) -> None:
    walker, first, second = two_parts(family, uses=2)
    storages = {p.untyped_storage().data_ptr() for p in family.model.parameters()}
    for one, two in zip(operands(first), operands(second), strict=True):
        is_weight = torch.from_numpy(one.array).untyped_storage().data_ptr() in storages
        assert (one.id == two.id) == is_weight
        assert one.uses == two.uses == (2 if is_weight else 1)
    kept = {operand.id for operand in operands(first) if operand.uses > 1}
    kinds = {
        (operand, product.critical) for product in first + second for operand in product.kept if operand is not None
    }
    assert len(kinds) == len(kept), "every use of a weight is of one kind, critical or deferred"
    assert len(kept) >= LINEAR_LAYERS[family.name]
    walker.weights_changed()
    assert [{operand.id for operand in gone} for gone in walker.fleet.forgotten] == [kept]
    walker.weights_changed()
    assert len(walker.fleet.forgotten) == 1
    before = len(walker.fleet.submitted)
    family._step(family.forward, seed=1)
    assert not kept & {operand.id for operand in operands(walker.fleet.submitted[before:])}


def test_a_weight_that_is_used_once_is_not_kept(family: Family) -> None:
    walker, first, second = two_parts(family, uses=1)
    assert all(product.kept == (None, None) for product in first + second)
    walker.weights_changed()
    assert walker.fleet.forgotten == []


def test_keeping_weights_changes_no_bit(family: Family) -> None:
    plain, _ = family.distributed()
    family.walker = Walker(Fleet(ORDERS["reversed"]))
    family.walker.keep(family.model.parameters(), uses=4)
    kept = family._step(family.forward, seed=1)
    assert torch.equal(kept.loss, plain.loss)
    assert all(torch.equal(kept.gradients[name], plain.gradients[name]) for name in plain.gradients)
