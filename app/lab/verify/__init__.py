"""Verification that a model trains the same on one device, under dp and ddp, and after a resume."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

# only for type checkers, because every rank of a recorded run imports this package
if TYPE_CHECKING:
    from app.lab.verify.verdict import Verdict


def same_training(
    model: str,
    data: str,
    *,
    flags: Mapping[str, Any] | None = None,
    variants: Mapping[str, dict[str, Any]] | None = None,
    steps: int = 30,
    quick: bool = False,
) -> "Verdict":
    """Return whether a model trains the same under dp and ddp, on several nodes, after a resume.

    In a test: `assert same_training("my.Model", "my.Data")`.

    Args:
        model: Import path of the LightningModule.
        data: Import path of the LightningDataModule.
        flags: Flags of `fit`, without dashes: `{"data.batch_size": 32}`.
        variants: Flags of `fit` for further variants, by variant name, such as
            `{"ddp × 3": {"trainer.devices": 3}}`.
        steps: Number of optimizer steps of each run.
        quick: Whether to run only `ddp × 2`, `stop and resume`, and `variants`.

    Returns:
        The verdict: true if all variants train the same. Its `repr` shows a table of the variants,
        and the causes of their differences.

    Raises:
        UserError: When an argument is rejected, or the training fails on one device.
    """
    from app.lab.verify.proof import Prover, Settings

    settings = Settings(steps, dict(variants or {}), quick)
    typed = {"model": model, "data": data, **(flags or {})}
    with tempfile.TemporaryDirectory() as folder:
        return Prover(settings, [], typed, Path(folder)).run()
