"""Stop strings: the answer ends before the first one, and no part of one is ever let through."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.models.output.matching import partial_suffix


class StopStrings:
    """Lets text through up to the first stop string, keeping back what may be the beginning of one.

    The stop string that is *complete first* wins; of several that are complete at the same character, the longest.
    That makes the result independent of how the text is cut into tokens, and no text waits for a stop string that
    comes too late.
    """

    __slots__ = ("_kept", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in dict.fromkeys(stops) if stop)
        self._kept = ""
        #: The stop string that ended the answer.
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown. After a match nothing more may."""
        if self.matched is not None:
            return ""
        text = self._kept + text
        ends = [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, _, self.matched = min(ends)
            self._kept = ""
            return text[: end - len(self.matched)]
        keep = partial_suffix(text, self._stops)
        if not keep:
            self._kept = ""
            return text
        self._kept = text[-keep:]
        return text[:-keep]

    def finish(self) -> str:
        """What was kept back, now that nothing can complete it."""
        text, self._kept = self._kept, ""
        return text
