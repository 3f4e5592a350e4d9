"""Which blocks of a complete product are wrong: suspicion, evidence, doubt, verdict.

Suspicion is cheap and may err: a block whose energy (ps/verification/sketch.py) is too large, an audited cell that is
off (ps/verification/audit.py), a device whose sums have drifted (ps/verification/drift.py). Evidence is cells of that
device recomputed in float64 (ps/verification/recompute.py); no device is accused without it. Every
accusation also tests the check itself on the server's own kernels (ps/verification/fuse.py). All blocks that an accused
device returned for the product are discarded. Time is bounded: all suspects of a product share one allowance of terms,
and suspects that are not examined stay suspects. Pure, except for its own seeded randomness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ps.planning.cost import Integers
from ps.verification.audit import Audits
from ps.verification.drift import Drift
from ps.verification.fuse import LATELY, Fuse, State
from ps.verification.non_finite import failing_patches
from ps.verification.own_kernels import NAMES
from ps.verification.recompute import Evidence, Exact, Own, Patch, sampled_side
from ps.verification.rounding import Floats, upper
from ps.verification.sketch import MOST, Energies, Expectation, box_sums, grid_sums, impossible_cells, patch_ranges

Array = NDArray[np.float32]

DEVIATIONS = 5.0  # of a block's energy above the honest level; honest blocks stay below even that level
WORST_PATCHES = 4  # of a suspect that are recomputed, ...
OTHER_PATCHES = 12  # ... and at most this many others, at random
EXAMINED_TERMS = 1 << 29  # of float64 sums per check, shared by all suspects: less than 0.1 s; ...
AGAIN_TERMS = 1 << 29  # ... and then for suspects with too few recomputed cells, the loudest first
OWN_TERMS = 3 << 22  # that own kernels add up per check: about 0.1 s
LEAST_SIDE = 4  # fewest rows and columns of a patch that are recomputed
MOST_SUSPECTS = 64  # examined per check: those with the loudest blocks, ...
AT_RANDOM = 16  # ... and some of the others
ASKED = 4  # accused devices on whose patches own kernels are tested


@dataclass(frozen=True, slots=True)
class Findings:
    wrong: list[int] = field(default_factory=list)  # indices of blocks
    why: dict[int, str] = field(default_factory=dict)  # device -> the evidence against it
    examined: int = 0  # devices with recomputed cells
    doubted: str = ""  # why the check found itself at fault


class Verifier:
    def __init__(self, seed: int | Sequence[int] = 0) -> None:
        self._random = np.random.default_rng(seed)
        self.drift, self.fuse = Drift(), Fuse()
        self._far: dict[int, list[tuple[int, int]]] = {}  # product, patches in which a device had a cell far off

    def check(
        self,
        left: Array,
        right: Array,
        out: Array,
        boxes: Integers,
        devices: Integers,
        expected: Expectation,
        fleet: int,
        again: bool = False,
    ) -> Findings:
        """`fleet`: number of devices present. `again`: drift has already counted this product."""
        if not len(boxes):
            return Findings()
        self.fuse.next_product()
        view = _View(left, right, out, boxes, devices, expected, self._random)
        drifted: set[int] = set()
        if expected.special:
            patch = failing_patches(left, right, out, expected)
            loudness = view.sums(patch)
            loud = loudness > 0
        else:
            energies = Energies.of(expected, out, boxes)
            bad = np.zeros(len(boxes), np.bool_)
            if (energies.patch >= MOST).any():  # otherwise a NaN would make all blocks near it suspect
                energies, bad = view.without_impossible_cells()
            norms = expected.rows.norms, expected.columns.norms
            audits = Audits.of(left, right, out, boxes, norms, self._random)
            patch = energies.patch
            limit = energies.patches * upper(energies.patches, DEVIATIONS)
            loudness = energies.total / limit
            loud = (loudness > 1) | bad
            loudness[bad] = MOST
            if audits.wrong.any():
                view.audited = audits.cells[audits.wrong]
                view.audited_by = devices[audits.blocks[audits.wrong]]
                hit = audits.blocks[audits.wrong]
                loudness[hit], loud[hit] = np.maximum(loudness[hit], 1.0), True
            if not again:
                self.drift.blocks(devices, energies.total, energies.patches)
                self.drift.audited(devices[audits.blocks], audits.errors)
                over = self.drift.suspects()
                drifted = set(over[np.isin(over, devices)].tolist()) if len(over) else set()
        if not drifted and not loud.any():
            return Findings()
        suspects = dict.fromkeys(drifted, 0.0)
        for device, size in zip(devices[loud].tolist(), loudness[loud].tolist(), strict=True):
            suspects[device] = max(suspects.get(device, 0.0), size)
        return self._judge(view, patch, suspects, drifted, fleet)

    def _judge(self, view: _View, patch: Floats, suspects: dict[int, float], drifted: set[int], fleet: int) -> Findings:
        """`suspects`: the loudness of each suspect's blocks, 0 if only its sums are suspicious (`drifted`)."""
        against: dict[int, Evidence] = {}
        accused: list[_Examined] = []
        turn = self._turn(suspects)
        more = AGAIN_TERMS
        for device in turn:
            examined = view.examine(patch, device, EXAMINED_TERMS // len(turn))
            if examined.short and more > 0 and not examined.evidence.against:
                examined = view.examine(patch, device, more)
                more -= examined.terms
            evidence = examined.evidence
            if not evidence.against and evidence.far:
                evidence = replace(evidence, far=self._far_lately(device, evidence.far))
            if evidence.against:
                against[device] = evidence
                accused.append(examined)
            elif not examined.short:
                self._acquit(device, drifted, suspects[device] > 0)
        if not against:
            return Findings(examined=len(turn))
        state, doubted = self.fuse.accuse(list(against), fleet), ""
        at_fault, by_size = self._own_kernel_fails(view, accused[:ASKED])
        if at_fault:
            if by_size:
                self.fuse.at_fault()
            doubted = f"{at_fault} fails the check too: {next(iter(against.values())).against}"
        for device, evidence in list(against.items()):
            if at_fault or (state is State.BLOWN and not evidence.impossible):
                del against[device]
                self._acquit(device, drifted, suspects[device] > 0)
        wrong = np.flatnonzero(np.isin(view.devices, list(against))).tolist()
        return Findings(wrong, {d: e.against for d, e in against.items()}, len(turn), doubted)

    def _far_lately(self, device: int, patches: int) -> int:
        """Recent patches of this device with a cell far off, these included: a device may return few per product."""
        now = self.fuse.product
        recent = [(when, count) for when, count in self._far.get(device, []) if when > now - LATELY]
        self._far[device] = [*recent, (now, patches)]
        return sum(count for _, count in self._far[device])

    def _turn(self, suspects: dict[int, float]) -> list[int]:
        """Suspects to examine now, the loudest first. The others stay suspects: they are examined when a block of this
        product is recomputed, or in another product."""
        order = sorted(suspects, key=lambda device: (-suspects[device], device))
        first, rest = order[: MOST_SUSPECTS - AT_RANDOM], order[MOST_SUSPECTS - AT_RANDOM :]
        others: list[int] = self._random.permutation(np.array(rest, np.int64))[:AT_RANDOM].tolist()
        return first + others

    def _acquit(self, device: int, drifted: set[int], loud: bool) -> None:
        """Sums start again only if they were the reason: otherwise one loud error would make room for quiet ones."""
        if loud:
            self.drift.explained(device)
        elif device in drifted:
            self.drift.acquit(device)

    @staticmethod
    def _own_kernel_fails(view: _View, accused: list[_Examined]) -> tuple[str, bool]:
        """The name of an own float32 kernel that would also be accused in patches of these devices, empty if there is
        none; and whether by the size of its errors. Runs once per product, on few cells, which tell as much about the
        check as all cells would."""
        samples = [view.sample(one) for one in accused]
        for index, name in enumerate(NAMES):
            patches = [exact.patch(own.outs[index], own) for exact, own in samples]
            for evidence in (Evidence.of(patches), *(Evidence.of([patch]) for patch in patches)):
                if evidence.against:
                    return name, bool(evidence.against_its_size)
        return "", False


@dataclass(frozen=True, slots=True)
class _Place:
    """Rows and columns of a patch to recompute."""

    batch: int
    rows: Integers
    columns: Integers


@dataclass(frozen=True, slots=True)
class _Examined:
    evidence: Evidence
    place: _Place  # the patch with the strongest evidence
    terms: int = 0  # terms summed
    short: bool = False  # the allowance of terms did not cover a whole patch


@dataclass(slots=True)
class _View:
    """A product with its blocks, and its cells by device."""

    left: Array
    right: Array
    out: Array
    boxes: Integers
    devices: Integers
    expected: Expectation
    random: np.random.Generator
    audited: Integers = field(default_factory=lambda: np.empty((0, 3), np.int64))  # wrong audited cells
    audited_by: Integers = field(default_factory=lambda: np.empty(0, np.int64))  # the device of each
    owned: list[Own] = field(default_factory=list)  # results of own kernels so far
    own_terms: int = OWN_TERMS  # terms left for own kernels

    def sums(self, patch: Floats) -> Floats:
        return box_sums(patch, patch_ranges(self.expected, self.boxes))

    def without_impossible_cells(self) -> tuple[Energies, NDArray[np.bool_]]:
        """Energies as if cells that no kernel gives were 0, except in their own patches; and the blocks with such
        cells."""
        cells = impossible_cells(self.expected, self.out)
        energies = Energies.of(self.expected, np.where(cells, np.float32(0), self.out), self.boxes)
        hit = grid_sums(self.expected, cells)
        energies.patch[hit > 0] = MOST
        return energies, self.sums(hit) > 0

    def places(self, patch: Floats, device: int) -> list[_Place]:
        """Patches of this device: those with wrong audited cells, those with the most energy, some at random."""
        rows, columns = self.expected.rows.bounds, self.expected.columns.bounds
        chosen: dict[tuple[int, int, int], tuple[int, int] | None] = {}
        for b, i, j in self.audited[self.audited_by == device].tolist():
            r, c = (int(np.searchsorted(bounds, x, side="right")) - 1 for bounds, x in ((rows, i), (columns, j)))
            chosen[b, r, c] = i - int(rows[r]), j - int(columns[c])
        found = [
            (float(patch[b, r, c]), b, r, c)
            for b0, b1, r0, r1, c0, c1 in patch_ranges(self.expected, self.boxes[self.devices == device]).tolist()
            for b in range(b0, b1)
            for r in range(r0, r1)
            for c in range(c0, c1)
        ]
        found.sort(reverse=True)
        rest = found[WORST_PATCHES:]
        some = self.random.choice(len(rest), min(OTHER_PATCHES, len(rest)), replace=False).tolist() if rest else []
        for _, b, r, c in found[:WORST_PATCHES] + [rest[i] for i in some]:
            chosen.setdefault((b, r, c), None)
        return [self._place(b, r, c, cell) for (b, r, c), cell in chosen.items()]

    def _place(self, b: int, r: int, c: int, cell: tuple[int, int] | None) -> _Place:
        """The whole patch, `cell` first."""
        rows, columns = (
            np.arange(side.bounds[k], side.bounds[k + 1])
            for side, k in ((self.expected.rows, r), (self.expected.columns, c))
        )
        if cell is not None:
            rows, columns = np.roll(rows, -cell[0]), np.roll(columns, -cell[1])
        return _Place(b, rows, columns)

    def examine(self, patch: Floats, device: int, terms: int) -> _Examined:
        """Evidence on the device's answers, from sums of about `terms` terms. Stops early if the worst patches
        suffice."""
        places, done, short = self.places(patch, device), 0, False
        examined: list[tuple[_Place, Exact, Array]] = []
        result = _Examined(Evidence(), places[0])
        for count in (min(WORST_PATCHES, len(places)), len(places)):
            for place in places[len(examined) : count]:
                if terms <= done:
                    break
                fitting = self._fitting(place, terms - done)
                short |= not examined and fitting is not place
                done += len(fitting.rows) * len(fitting.columns) * self.left.shape[2]
                examined.append((fitting, self._exact(fitting), self._out(fitting)))
            result = self._weigh(examined)
            if result.evidence.against or len(examined) < count:
                break
        return replace(result, terms=done, short=short)

    def _weigh(self, examined: list[tuple[_Place, Exact, Array]]) -> _Examined:
        """The evidence without own kernels if that suffices, otherwise with them."""
        patches = [exact.glimpse(out) for _, exact, out in examined]
        for (place, _, _), patch in zip(examined, patches, strict=True):
            if patch.impossible:
                return _Examined(Evidence.of([patch]), place)
        evidence, _ = _strongest(patches)
        if evidence.against or evidence.far:
            patches = [exact.patch(out, self._own(exact, out)) for _, exact, out in examined]
        evidence, index = _strongest(patches)
        return _Examined(evidence, examined[index][0])

    def _own(self, exact: Exact, out: Array) -> Own:
        """Errors of own kernels in this patch; once their terms are used up, estimated from other patches."""
        if self.owned and self.own_terms <= 0:
            return exact.typical(self.owned)
        own = exact.own(self.random, exact.worst(out))
        self.own_terms -= len(own.rows) * len(own.columns) * exact.inner
        self.owned.append(own)
        return own

    def sample(self, examined: _Examined) -> tuple[Exact, Own]:
        """Few cells of the patch with the strongest evidence, and the results of own kernels there."""
        place = examined.place
        side = sampled_side(self.left.shape[2])
        rows, columns = (self.random.permutation(x)[:side] for x in (place.rows, place.columns))
        exact = self._exact(_Place(place.batch, rows, columns))
        return exact, exact.own(self.random)

    def _fitting(self, place: _Place, terms: int) -> _Place:
        """The first rows and columns, as many as `terms` allows; they include the cell that an audit found."""
        rows, columns, inner = place.rows, place.columns, self.left.shape[2]
        if len(rows) * len(columns) * inner <= terms:
            return place
        side = max(LEAST_SIDE, int(np.sqrt(terms / inner)))
        high, wide = min(side, len(rows)), min(side, len(columns))
        high, wide = (
            min(len(rows), max(high, side * side // wide)),
            min(len(columns), max(wide, side * side // high)),
        )
        return _Place(place.batch, rows[:high], columns[:wide])

    def _exact(self, place: _Place) -> Exact:
        b, rows, columns = place.batch, self.expected.rows.norms, self.expected.columns.norms
        return Exact(
            _taken(self.left[b], place.rows),
            _taken(self.right[b], place.columns),
            rows[b, place.rows],
            columns[b, place.columns],
        )

    def _out(self, place: _Place) -> Array:
        result: Array = self.out[place.batch][np.ix_(place.rows, place.columns)]
        return result


def _taken(array: Array, rows: Integers) -> Array:
    """The rows, as a view if they are adjacent: copying long rows costs as much as the sums."""
    if rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
        return array[int(rows[0]) : int(rows[-1]) + 1]
    return array[rows]


def _strongest(patches: list[Patch]) -> tuple[Evidence, int]:
    """The evidence of all patches, or of one patch that is against the device by itself; and the strongest patch."""
    whole = Evidence.of(patches)
    single = [Evidence.of([patch]) for patch in patches]
    worst = max(range(len(single)), key=lambda i: single[i].square, default=0)
    if whole.against:
        return whole, worst
    return next(((one, i) for i, one in enumerate(single) if one.against), (whole, worst))
