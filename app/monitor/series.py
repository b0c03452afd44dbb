"""Time series of measurements over a run."""

MOST = 200  # maximum number of points in a series, because a plot shows no more


class Series:
    """Time series of measurements, thinned evenly so that its length is limited.

    Attributes:
        points: Kept measurements, each as `[seconds, *values]`.
    """

    def __init__(self) -> None:
        self.points: list[list[float]] = []
        self._every = 1
        self._seen = 0

    def add(self, seconds: float, *figures: float) -> None:
        """Add the seconds since the start of training, and figures, such as one per rank."""
        if self._seen % self._every == 0:
            self.points.append([round(number, 4) for number in (seconds, *figures)])
            if len(self.points) > MOST:
                del self.points[1::2]
                self._every *= 2
        self._seen += 1
