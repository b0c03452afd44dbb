"""Time series of measurements over a run."""

MOST = 200  # most points of a series, as many as a plot shows
NUMBERS = 12_800  # most numbers of a series


class Course:
    """Time series of measurements, thinned evenly, so that long and short runs need equal space.

    Args:
        width: Number of figures per measurement.

    Attributes:
        points: Seconds and figures of each kept measurement.
    """

    def __init__(self, width: int = 1) -> None:
        self.points: list[list[float]] = []
        self._most = min(max(NUMBERS // width, 20), MOST)
        self._every, self._seen = 1, 0

    def add(self, seconds: float, *figures: float) -> None:
        """Add a measurement."""
        if self._seen % self._every == 0:
            self.points.append([round(number, 4) for number in (seconds, *figures)])
            if len(self.points) > self._most:
                del self.points[1::2]
                self._every *= 2
        self._seen += 1
