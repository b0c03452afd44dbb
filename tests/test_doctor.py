"""What this machine has and what will work on it."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import error_of, start_app

from app.doctor import Check, environment, examine

App = Callable[..., tuple[int, str]]


def found_before_the_self_test(root: Path) -> dict[str, Check]:
    checks, found = examine(str(root)), {}
    while "tracker" not in found:
        check = next(checks)
        found[check.name] = check
    return found


@pytest.mark.parametrize(
    ("variables", "level", "said"),
    [
        ({}, "green", "none"),
        ({"RANK": "3", "MASTER_ADDR": "node7"}, "red", "RANK=3 left over"),
        ({"LOCAL_RANK": "0"}, "red", "LOCAL_RANK=0 left over"),
        ({"MASTER_ADDR": "node7", "MASTER_PORT": "1"}, "yellow", "MASTER_ADDR=node7, MASTER_PORT=1 set"),
        ({"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}, "green", "torchrun"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "red", "TORCHELASTIC_RUN_ID=x left over"),
        ({"SLURM_JOB_ID": "12"}, "green", "SLURM job 12"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "yellow", "MPI"),
    ],
)
def test_what_launchers_leave(variables: dict[str, str], level: str, said: str) -> None:
    (check,) = environment(variables)
    assert check.level == level
    assert said in check.found
    assert ("unset" in check.remedy) == ("node7" in variables.values() or level == "red")


def test_data_sets_present_missing_and_broken(
    fashion_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = found_before_the_self_test(fashion_root)
    assert found["FashionMNIST"].level == "green"
    assert (found["CIFAR10"].level, found["CIFAR10"].found) == ("yellow", f"not there in {fashion_root}")
    assert {"versions", "accelerators", "processor", "disk", "backends", "tracker"} <= found.keys()
    assert re.fullmatch(r"Python 3\S+, torch \S+, .*, wandb \S+; .*(glibc|N/A).*", found["versions"].found)
    assert "WANDB_MODE" in found["tracker"].found
    file = fashion_root / "FashionMNIST" / "raw" / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-1])
    broken = found_before_the_self_test(fashion_root)["FashionMNIST"]
    assert broken.level == "red"
    assert f"{file} is truncated" in broken.found
    file.unlink()
    assert "parts are missing" in found_before_the_self_test(fashion_root)["FashionMNIST"].found
    assert not list(tmp_path.rglob("*.gz")), "it downloads nothing"


def test_intact_cifar(cifar_root: Path) -> None:
    assert found_before_the_self_test(cifar_root)["CIFAR10"].level == "green"


def test_flags(app: App) -> None:
    assert "--jsn: there is no such flag: did you mean --json?" in error_of(*app("doctor", "--jsn"))


@pytest.mark.slow
def test_the_whole_of_it_with_misleading_variables(tmp_path: Path) -> None:
    left: dict[str, str | None] = {"LOCAL_RANK": "1", "MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "9"}
    code, out = start_app("doctor", "--json", "--data_root", tmp_path, env=left)
    assert code == 1
    report = json.loads(out)
    assert report["level"] == "red"
    by_name = {check["name"]: check for check in report["checks"]}
    assert [name for name, check in by_name.items() if check["level"] == "red"] == ["launcher"]
    assert "unset LOCAL_RANK MASTER_ADDR MASTER_PORT" in by_name["launcher"]["remedy"]
    tested = {name for name in by_name if name.endswith(("x1", "x2"))}
    assert {name.split()[0] for name in tested} >= {"dp", "ddp", "ddp_spawn"}
    assert "GB/s" in by_name["all-reduce"]["found"]
    assert "written and read" in by_name["checkpoint"]["found"]
    assert not list(tmp_path.iterdir())
