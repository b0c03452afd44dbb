"""Time series of measurements over a run."""

MOST = 200  # maximum number of points in a series, because a plot shows no more
# maximum number of values in a series: points × values per point. A series with many values per
# point may exceed it, because the limit of points is never below 20
NUMBERS = 12_800


class Series:
    """Time series of measurements, thinned evenly so that its length is limited.

    Args:
        width: Number of values per measurement, such as one per rank.

    Attributes:
        points: Kept measurements, each as `[seconds, *values]`.
    """

    def __init__(self, width: int = 1) -> None:
        self.points: list[list[float]] = []
        self._most = min(max(NUMBERS // width, 20), MOST)
        self._every = 1
        self._seen = 0

    def add(self, seconds: float, *figures: float) -> None:
        """Add a measurement: the seconds since the start of training, and `width` figures."""
        if self._seen % self._every == 0:
            self.points.append([round(number, 4) for number in (seconds, *figures)])
            if len(self.points) > self._most:
                del self.points[1::2]
                self._every *= 2
        self._seen += 1
