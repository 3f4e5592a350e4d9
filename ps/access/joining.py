"""What admitted connections may do: how often they join, with how many devices, and how much they may measure.

Used by the server's thread. `ps/access/admission.py` has already decided to accept the connection.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace

from agent.protocol.errors import UserError
from agent.protocol.wire import Join, printable
from ps.access.access_file import AccessFile
from ps.access.access_list import REVOKED, AccessList, Budget, Enrolled, Refusal, seen
from ps.access.admission import Caller, ConnectionAdmission, Refusals

JOINS = (20.0, 0.1)  # per key: burst, per second
LOCAL_JOINED_BYTES = (
    4e6,
    4e5,
)  # for all local connections together: parsing it takes up to 6% of the server's time
PROBES = (128.0, 20.0)  # per key, and for all local connections together; measuring a link takes up to 60
PROBED_BYTES = (512e6, 2e6)  # both directions
LOCAL_PROBED_BYTES = (4e9, 1e9)  # for all local connections together, which measure only this machine's memory
MOST_BUDGETS = 10_000  # keys whose budgets are kept

TOO_OFTEN = Refusal("this device joins too often; it may again in a minute")
TOO_MANY_AT_ONCE = Refusal("too many devices join at the same moment; try again")
TOO_MANY = Refusal("this device's key may bring fewer devices than that")
ONE_DEVICE = Refusal("a connection brings one device; only pods that the run has started bring many")
PASSING = (TOO_OFTEN, TOO_MANY_AT_ONCE)  # temporary refusals


class JoinAdmission:
    def __init__(
        self,
        access: AccessFile | None,
        admission: ConnectionAdmission,
        refusals: Refusals,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._access, self._admission, self._refusals, self._now_s = access, admission, refusals, now_s
        self._access_list = access.read() if access is not None else AccessList()
        self._joins: OrderedDict[str, Budget] = OrderedDict()  # by key
        self._probes: OrderedDict[str, Budget] = OrderedDict()
        self._probed_bytes: OrderedDict[str, Budget] = OrderedDict()
        self._mine: tuple[str, ...] = ()
        self._seen: dict[str, tuple[float, str]] = {}  # key -> when last connected, and the name; not written yet

    def listens(self, addresses: Iterable[str], enrolling: int) -> None:
        """Record these encrypted endpoints and the port of the entrance; invitations name them."""
        mine = self._mine = tuple(address.removeprefix("tcp://") for address in addresses)
        if self._access is not None:
            self._change(lambda access_list: (replace(access_list, listening=mine, enrolling=enrolling), None))

    def may_read_join(self, caller: Caller, size: int) -> Refusal | None:
        """Why a JOIN of this size may not be parsed; None if it may."""
        if caller.of_the_run:
            return None
        if caller.key:
            return None if self._budget(self._joins, caller.key, JOINS, 1) else TOO_OFTEN
        return None if self._budget(self._joins, "", LOCAL_JOINED_BYTES, size) else TOO_MANY_AT_ONCE

    def admit(self, caller: Caller, join: Join, present: int) -> Refusal | None:
        """Why the caller may not add these devices to the `present` ones of its connection; None if it may."""
        name, key = printable(join.labels[0])[:60], caller.key
        answer: Enrolled | Refusal | None = None
        if key:
            known = self._admission.trusted.get(key)
            answer = known or self._known(key, name)
            if isinstance(answer, Enrolled) and present + len(join.profiles) > answer.devices:
                answer = TOO_MANY
        elif not caller.of_the_run and present + len(join.profiles) > 1:
            answer = ONE_DEVICE
        if isinstance(answer, Refusal):
            self._refusals.refuse(key, name, answer.reason)
            return answer
        return None

    def _known(self, key: str, name: str) -> Enrolled | Refusal:
        """Note that this device is connected, under this name. Written with the next heartbeat: each write rewrites the
        whole file."""
        found = self._read().find(key)
        if found is None or found.revoked_s is not None:
            return REVOKED
        self._seen[key] = self._now_s(), name
        return found

    def may_read_probe(self, caller: Caller, size: int) -> Refusal | None:
        """Why a PROBE of this size may not be parsed; None if it may."""
        if caller.of_the_run:
            return None
        may = self._budget(self._probes, caller.key, PROBES, 1) and self._may_move(caller.key, size)
        return None if may else TOO_OFTEN

    def may_probe(self, caller: Caller, wanted_bytes: int) -> Refusal | None:
        key = caller.key
        if key and key not in self._admission.trusted:
            known = self._read().find(key)
            if known is None or known.revoked_s is not None:
                self._refusals.refuse(key, "a device", REVOKED.reason)
                return REVOKED
        return None if self._may_move(key, wanted_bytes) else TOO_OFTEN

    def _may_move(self, key: str, size: int) -> bool:
        return self._budget(self._probed_bytes, key, PROBED_BYTES if key else LOCAL_PROBED_BYTES, size)

    def _budget(self, budgets: OrderedDict[str, Budget], key: str, allowed: tuple[float, float], amount: float) -> bool:
        now_s = self._now_s()
        if key not in budgets:
            budgets[key] = Budget.full(*allowed, now_s)
            if len(budgets) > MOST_BUDGETS:
                budgets.popitem(last=False)
        return budgets[key].take(amount, now_s)

    def revoked(self, keys: Iterable[str]) -> set[str]:
        """The keys, among these, that have been revoked."""
        if self._access is None:
            return set()
        return {device.key for device in self._read().enrolled if device.revoked_s is not None}.intersection(keys)

    def left(self, keys: Iterable[str]) -> None:
        """Note that devices with these keys were connected until now."""
        for key in keys:
            if key and key not in self._admission.trusted:
                self._seen[key] = self._now_s(), self._seen.get(key, (0.0, ""))[1]

    def write(self) -> None:
        """Write which keys were connected; called with each heartbeat."""
        if self._seen and self._access is not None:
            here, self._seen = self._seen, {}
            self._change(lambda access_list: (seen(access_list, here), None))

    def close(self) -> None:
        self.write()
        if self._access is not None and self._mine:
            self._change(
                lambda access_list: (
                    replace(access_list, listening=tuple(set(access_list.listening) - set(self._mine))),
                    None,
                )
            )

    def _change(self, how: Callable[[AccessList], tuple[AccessList, None]]) -> None:
        assert self._access is not None
        try:
            self._access.soon(lambda access_list: how(access_list)[0])
        except UserError as error:
            self._refusals.say_once("", f"{error}")

    def _read(self) -> AccessList:
        assert self._access is not None
        try:
            self._access_list = self._access.read()
        except UserError as error:
            self._refusals.say_once("", f"{error}")
        return self._access_list
