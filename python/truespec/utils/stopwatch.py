"""Where time goes: seconds per named phase, summed over many runs of the same phases."""

from __future__ import annotations

from time import perf_counter


class Stopwatch:
    """Sums of seconds by phase.

    Attributes:
        seconds: phase -> seconds so far.
    """

    def __init__(self, *phases: str) -> None:
        self.seconds = dict.fromkeys(phases, 0.0)
        self._last = 0.0

    def start(self) -> None:
        """Begin a run; the first `lap` counts from here."""
        self._last = perf_counter()

    def lap(self, phase: str) -> float:
        """Count the time since `start` or the last `lap` for `phase`; returns it."""
        now = perf_counter()
        spent = now - self._last
        self.seconds[phase] += spent
        self._last = now
        return spent
