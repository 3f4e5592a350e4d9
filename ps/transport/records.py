"""Records of every block. Adding one is cheap; they become one table at the end of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps.planning.cost import Integers
from ps.planning.plans import Shape

Stamps = int | NDArray[np.uint64]  # of all answers of a message, or of each


@dataclass(slots=True)
class Loss:
    """Devices that were lost with unfinished blocks, and the times of the recovery."""

    devices: list[int]
    blocks: int
    detected_ns: int
    planned_ns: int  # its rectangles were cut again
    sent_ns: int = 0  # they were sent
    done_ns: int = 0  # they were done; 0: the run ended before


class Records:
    def __init__(self) -> None:
        # answers of one message, with device ids; when they were received; when they left the pod, 0 if not stated
        self._answers: list[tuple[NDArray[np.void], Stamps, Stamps]] = []
        self.losses: dict[int, Loss] = {}
        self._resending: list[Loss] = []
        self._jobs: dict[int, tuple[str, int, int, Integers, NDArray[np.uint64]]] = {}

    def answered(
        self,
        answers: NDArray[np.void],
        ids: list[int],
        received_ns: int,
        counted: set[tuple[int, int, int]] | None = None,
        left_ns: int = 0,
        due_counts: bool = True,
    ) -> None:
        """The answers of one message from a connection with these devices. All of them count, or those whose (device,
        job, block) is in `counted`. `due_counts`: they come from a pod of this run, which says when they were due."""
        answers = answers.copy()  # the original holds the whole message
        if not due_counts:
            answers["due_ns"] = 0
        answers["device"] = [ids[index] for index in answers["device"].tolist()]  # few of thousands
        if counted is not None:
            kept = []
            for device, job, block in answers[["device", "job", "block"]].tolist():
                key = (device, job, block)
                kept.append(key in counted)
                counted.discard(key)  # the same answer twice counts once
            answers = answers[kept]
        self.counted(answers, received_ns, left_ns)

    def counted(self, answers: NDArray[np.void], received_ns: Stamps, left_ns: Stamps = 0) -> None:
        """Answers that count, with device ids."""
        if not len(answers):
            return  # or a hostile device could fill the server's memory
        self._answers.append((answers, received_ns, left_ns))

    def lost(self, loss: int, devices: list[int], blocks: int, detected_ns: int, planned_ns: int) -> None:
        self.losses[loss] = Loss(devices, blocks, detected_ns, planned_ns)
        self._resending.append(self.losses[loss])

    def sent_again(self, at_ns: int) -> None:
        for loss in self._resending:
            loss.sent_ns = at_ns
        self._resending.clear()

    def recovered(self, loss: int, at_ns: int) -> None:
        self.losses[loss].done_ns = at_ns

    def finished(
        self, job: int, name: str, step: int, shape: Shape, boxes: Integers, sent_ns: NDArray[np.uint64]
    ) -> None:
        self._jobs[job] = (name, step, shape.inner, boxes, sent_ns)

    @property
    def products(self) -> int:
        """The number of finished products."""
        return len(self._jobs)

    def columns(self) -> dict[str, NDArray[Any]]:
        """One row per block, in order of arrival; times in seconds since the first block was sent."""
        if not self._answers:
            return {}
        answers = np.concatenate([a for a, _, _ in self._answers])
        received_ns = np.concatenate([np.full(len(a), at, np.uint64) for a, at, _ in self._answers])
        left_ns = np.concatenate([np.full(len(a), at, np.uint64) for a, _, at in self._answers])
        known = np.isin(answers["job"], np.fromiter(self._jobs, np.uint64, len(self._jobs)))
        answers, received_ns, left_ns = answers[known], received_ns[known], left_ns[known]
        jobs, position = np.unique(answers["job"], return_inverse=True)
        offset = np.cumsum([0] + [len(self._jobs[j][3]) for j in jobs.tolist()])
        row = offset[position] + answers["block"]
        boxes = np.concatenate([self._jobs[j][3] for j in jobs.tolist()])[row]
        sent_ns = np.concatenate([self._jobs[j][4] for j in jobs.tolist()])[row]
        start_ns = sent_ns.min()

        def seconds(stamp: NDArray[np.uint64]) -> NDArray[np.float64]:
            return (stamp.astype(np.int64) - np.int64(start_ns)) / 1e9

        of_job = [self._jobs[j] for j in jobs.tolist()]
        due_ns = answers["due_ns"]
        return {
            "step": np.array([j[1] for j in of_job], np.int32)[position],
            "product": np.array([j[0] for j in of_job])[position],
            "job": answers["job"].astype(np.int64),
            "block": answers["block"].astype(np.int32),
            "device": answers["device"].astype(np.int32),
            "batch": boxes[:, 0].astype(np.int32),
            "batches": boxes[:, 1].astype(np.int32),
            "row": boxes[:, 2].astype(np.int32),
            "rows": boxes[:, 3].astype(np.int32),
            "column": boxes[:, 4].astype(np.int32),
            "columns": boxes[:, 5].astype(np.int32),
            "inner": np.array([j[2] for j in of_job], np.int32)[position],
            "sent_s": seconds(sent_ns),
            "due_s": np.where(due_ns > 0, seconds(due_ns), np.nan),
            "left_s": np.where(left_ns > 0, seconds(left_ns), np.nan),
            "received_s": seconds(received_ns),
            "compute_s": answers["compute_s"].astype(np.float64),
        }
