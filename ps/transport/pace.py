"""How the server's loop divides its time: what is due when, and how long the parts of a turn may take."""

from __future__ import annotations

from dataclasses import dataclass

# Late and silent devices are normally judged once the socket is empty, but after this long even if it is not: a flood
# of messages must not stop the clock. Reading the answers of a thousand devices after a hitch takes less time. And
# after so many turns: when the process was stopped, one turn takes longer than that, and has read next to nothing.
UNHEARD_S, UNHEARD_TURNS = 0.2, 4
# If reading took longer than this, the next request is left to the next turn, which then reads nothing.
LONG_S = 0.02

# No packing after this part of a turn, but for one message: answers and heartbeats wait meanwhile. A message of 8 MiB
# takes about 5 ms.
PACKING_S = 0.02

# A wait that took longer than this was a wait: the socket was empty when it began.
WAITED_S = 0.0002


@dataclass(slots=True)
class Pace:
    """When the loop's regular tasks are due. `beat_s` and `heard_s` are in the host's time, the other times in the
    dispatcher's."""

    beat_s: float
    look_s: float
    heard_s: float  # when the socket was last empty, or reading towards that began
    free_s: float  # when late blocks could last be judged
    empty_s: float  # when the socket was last seen empty: what is read now has arrived since then
    unheard: int = 0  # turns since then
    request_next: bool = False  # the last turn left a request to this one
