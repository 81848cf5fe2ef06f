"""Whether the next step drafts: by what steps cost here and now, and by what drafting brings on this text."""

from collections import deque
from statistics import median


class Pace:
    """Decides before each step whether it drafts, by what drafting has brought in this call.

    Speculation pays while a drafted step settles more tokens per second than plain steps would, so acceptance is
    compared with the break-even: seconds of a drafted step over seconds of a plain one, both as measured while
    decoding. Below it plain steps follow; then a few drafted ones look whether the text has become easier, and each
    look in vain doubles the wait for the next.

    Args:
        past: what earlier calls found.
        least: acceptance length below which drafting pauses; None measures the break-even.
    """

    _WINDOW = 16  # drafted steps that are judged together; the first judgement comes after so many
    _LOOK = 4  # drafted steps of a later look
    _PAUSE, _LONGEST_PAUSE = 16, 512  # plain steps
    _PLAIN = 3  # plain steps that tell what one costs, where that is not known yet

    def __init__(self, past: "Experience", least: float | None = None) -> None:
        self._past, self._least = past, least
        self._recent: deque[float] = deque(maxlen=self._WINDOW)
        # Where drafting did not pay last, a look has to do at the start of the next text too.
        self._needed = self._WINDOW if past.pause is None else self._LOOK
        self._plain_steps = 0
        self.pauses = 0

    def draft_next(self) -> bool:
        """Whether the next step drafts."""
        if self._plain_steps > 0:
            return False
        if len(self._recent) < self._needed:
            return True
        break_even = self._past.break_even if self._least is None else self._least
        if break_even is None:  # a few plain steps tell
            self._plain_steps = self._PLAIN
            return False
        if sum(self._recent) / len(self._recent) >= break_even:
            self._needed, self._past.pause = self._WINDOW, None
            return True
        self._recent.clear()
        self._needed = self._LOOK
        pause = self._past.pause
        self._plain_steps = self._PAUSE if pause is None else min(2 * pause, self._LONGEST_PAUSE)
        self._past.pause = self._plain_steps
        self.pauses += 1
        return False

    def observe(self, drafted: bool, tokens: float, seconds: float) -> None:
        """A step that settled `tokens` per row. `drafted`: anything was proposed; a drafter that knows nothing to say
        costs nothing, and is not judged by it.
        """
        self._past.add(drafted, seconds)
        if drafted:
            self._recent.append(tokens)
        elif self._plain_steps > 0:
            self._plain_steps -= 1


class Experience:
    """Seconds of recent drafted and plain steps, and whether drafting paid last, kept over the calls of a decoder.

    Attributes:
        pause: plain steps of the last pause; None where drafting paid last.
    """

    _KEPT, _ENOUGH = 32, 3

    def __init__(self) -> None:
        self.pause: int | None = None
        self._seconds: dict[bool, deque[float]] = {kind: deque(maxlen=self._KEPT) for kind in (False, True)}

    def add(self, drafted: bool, seconds: float) -> None:
        self._seconds[drafted].append(seconds)

    @property
    def break_even(self) -> float | None:
        """Tokens that a drafted step has to settle to be worth its time; None before both kinds are known.

        By medians: a machine's hiccups are not the drafter's fault.
        """
        if min(map(len, self._seconds.values())) < self._ENOUGH:
            return None
        return median(self._seconds[True]) / median(self._seconds[False])
