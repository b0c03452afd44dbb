"""What our patches expect of Lightning and torch is there; an upgrade that takes it away fails here, with its name."""

import pytest

from app.system import lightning_patches, torch_patches  # noqa: F401  (declare what they expect)
from app.system.patches import EXPECTED, expects, missing


@pytest.mark.parametrize("patch", list(EXPECTED))
def test_the_installed_version_has_what_a_patch_expects(patch: str) -> None:
    said = missing(patch)
    assert said is None, said


@pytest.mark.parametrize(
    "name",
    [
        "lightning.pytorch.trainer.trainer:Trainer._gone",  # a method, or what __init__ sets
        "lightning.pytorch.loops.fit_loop:_FitLoop.epoch_progress._gone",
        "torch.distributed:_gone",
        "lightning.gone:Trainer",
    ],
)
def test_a_name_that_is_gone_is_said(name: str) -> None:
    library = name.partition(".")[0]

    @expects("torch.nn:Module._parameters", name)  # only annotated: found all the same
    def patch() -> None: ...

    key = f"{__name__}.patch"
    try:
        said = missing(key) or ""
    finally:
        del EXPECTED[key]
    assert said.startswith(f"{key} needs {name}, which {library} ")
    assert said.endswith("does not have: see what took its place")
