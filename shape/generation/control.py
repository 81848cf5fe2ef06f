"""Whether the next step drafts: by what steps cost here and now, and by what drafting brings on this text."""

from collections import deque
from statistics import median

# Where the clock must not decide, the acceptance length at which a drafted step is taken to be worth its time: a tree
# costs 1.1 to 1.3 single tokens, and its draft 0.1 to 0.3 (``python eval/forwards.py``, efficiency).
FIXED_BREAK_EVEN = 1.4


class Pace:
    """Decides before each step whether it drafts, by what drafting has brought in this call.

    Speculation pays while a drafted step settles more tokens per second than plain steps would, so acceptance is
    compared with the break-even: seconds of a drafted step over seconds of a plain one, both as measured while
    decoding, behind as much context. Below it plain steps follow; then a few drafted ones look whether the text has
    become easier, and each look in vain doubles the wait for the next.

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

    def draft_next(self, context: int) -> bool:
        """Whether the next step drafts, behind so many tokens of the longest sequence."""
        if self._plain_steps > 0:
            return False
        if len(self._recent) < self._needed:
            return True
        break_even = self._least
        if break_even is None:
            if self._past.knows_too_little(context, drafted=True):
                return True
            if self._past.knows_too_little(context, drafted=False):  # a few plain steps tell
                self._plain_steps = self._PLAIN
                return False
            break_even = self._past.break_even(context)
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

    def observe(self, drafted: bool, tokens: float, seconds: float, context: int) -> None:
        """A step that settled `tokens` per row. `drafted`: anything was proposed; a drafter that knows nothing to say
        costs nothing, and is not judged by it.
        """
        self._past.add(drafted, seconds, context)
        if drafted:
            self._recent.append(tokens)
        elif self._plain_steps > 0:
            self._plain_steps -= 1


class Experience:
    """Seconds of recent drafted and plain steps by context length, and whether drafting paid last, kept over the calls
    of a decoder. Lengths between two powers of two count as one, as do all short ones.

    Attributes:
        pause: plain steps of the last pause; None where drafting paid last.
    """

    _KEPT, _ENOUGH = 16, 3
    _SHORT = 128  # tokens of context, below which it makes no difference
    _TRUSTED = 512  # drafted steps, after which what plain ones took is measured anew

    def __init__(self) -> None:
        self.pause: int | None = None
        self._seconds: dict[tuple[int, bool], deque[float]] = {}
        self._drafted_since: dict[int, int] = {}  # a plain step was measured, by context length

    def add(self, drafted: bool, seconds: float, context: int) -> None:
        kind = self._kind(context)
        since = self._drafted_since.get(kind, 0)
        if not drafted and since >= self._TRUSTED:
            self._seconds.pop((kind, False), None)
        self._drafted_since[kind] = since + 1 if drafted else 0
        self._seconds.setdefault((kind, drafted), deque(maxlen=self._KEPT)).append(seconds)

    def knows_too_little(self, context: int, drafted: bool) -> bool:
        """Whether steps of this kind have not been measured, or plain ones too long ago."""
        kind = self._kind(context)
        stale = not drafted and self._drafted_since.get(kind, 0) >= self._TRUSTED
        return stale or len(self._seconds.get((kind, drafted), ())) < self._ENOUGH

    def break_even(self, context: int) -> float:
        """Tokens that a drafted step has to settle to be worth its time, where both kinds are known.

        By medians: a machine's hiccups are not the drafter's fault.
        """
        kind = self._kind(context)
        return median(self._seconds[kind, True]) / median(self._seconds[kind, False])

    def _kind(self, context: int) -> int:
        return max(context, self._SHORT).bit_length()
