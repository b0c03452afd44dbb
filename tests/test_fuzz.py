"""Command lines, configs and experiments made at random: each works, or is refused in one line that names the flag.

`FAULTS=10` takes ten times as many.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from app.compare.command import _parse as parse_compare
from app.compare.experiment import expand
from app.errors import UserError
from app.fit.configuration import resolve
from app.fit.rules import check
from app.plan.command import _parse as parse_plan
from app.verify.command import _parse as parse_verify

EXAMPLES = 100 * int(os.environ.get("FAULTS", "1"))


def examples(times: int) -> settings:
    """So many times a hundred, the same ones every time."""
    return settings(
        max_examples=times * EXAMPLES, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


ODD = [
    *("-1", "0", "1", "-0.0", "0.5", "1e400", "-1e400", "nan", ".inf", "1e-400", "100000000000000000000", "9" * 5000),
    *("", " ", "null", "true", "[]", "{}", "[1,", "{a: 1}", "[[1]]", "!!python/object:os.system", "*a", "&a", "~", "'"),
    *(
        "x" * 3000,
        "名前",
        "ü",
        "\u202e",
        "a\nb",
        "\t",
        "%s",
        "${x}",
        "$HOME",
        "../..",
        "/",
        "/dev/null",
        "/proc/self/mem",
    ),
    *("os.system", "torch.nn.Linear", "torch.optim.Adam", "app.modules.CIFARCNN", "Adam", "ddp", "dp", "cuda", "auto"),
]
FLAGS = [
    *(
        f"trainer.{name}"
        for name in ("accelerator", "strategy", "devices", "num_nodes", "precision", "logger", "plugins")
    ),
    *(f"trainer.{name}" for name in ("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "fast_dev_run")),
    *(f"trainer.limit_{name}_batches" for name in ("train", "val", "test", "predict")),
    *(f"trainer.{name}" for name in ("overfit_batches", "val_check_interval", "check_val_every_n_epoch", "callbacks")),
    *(f"trainer.{name}" for name in ("num_sanity_val_steps", "log_every_n_steps", "enable_checkpointing", "profiler")),
    *(f"trainer.{name}" for name in ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")),
    *(f"trainer.{name}" for name in ("deterministic", "benchmark", "inference_mode", "detect_anomaly", "barebones")),
    *(
        f"trainer.{name}"
        for name in ("sync_batchnorm", "reload_dataloaders_every_n_epochs", "default_root_dir", "nope")
    ),
    *(
        f"trainer.strategy.{name}"
        for name in ("ddp_comm_hook", "bucket_cap_mb", "static_graph", "find_unused_parameters")
    ),
    *(f"trainer.strategy.{name}" for name in ("process_group_backend", "start_method", "class_path", "nope")),
    *("model", "model.network", "model.loss", "model.optimizer", "model.optimizer.lr", "model.optimizer.momentum"),
    *("model.scheduler", "model.scheduler.step_size", "model.scheduler_interval", "model.hidden", "model.repeats"),
    *("model.channels_last", "model.compile", "model.cuda_graph", "model.matmul_precision", "model.nope"),
    *("data", "data.like", "data.size", "data.data_seed", "data.batch_size", "data.val_size", "data.placement"),
    *("data.cache", "data.num_workers", "data.crop_padding", "data.flip", "data.cutout", "data.augment", "data.seed"),
    *("data.drop_last", "data.root", "data.nope", "seed_everything", "config", "ckpt_path"),
    *("run.name", "run.root", "run.test", "run.wandb", "run.project", "run.group", "run.tags", "run.warmup_epochs"),
    *("run.on_nonfinite", "run.nope", "run", "cluster", "trainer"),
    *("cluster.init_method", "cluster.node_rank", "cluster.timeout", "cluster.max_restarts", "cluster.log_dir"),
    *(
        f"{which}_checkpoint.{name}"
        for which in ("best", "last")
        for name in ("filename", "monitor", "mode", "save_top_k")
    ),
    *(
        f"last_checkpoint.{name}"
        for name in ("every_n_train_steps", "train_time_interval", "every_n_epochs", "dirpath")
    ),
    *("lr_monitor.logging_interval", "nope", "optimizer", "verbose"),
]
values = st.sampled_from(ODD) | st.integers().map(str) | st.floats().map(str) | st.text(max_size=20)
flags = st.lists(st.tuples(st.sampled_from(FLAGS), values), min_size=1, max_size=4)
COMMANDS = ("fit", "validate", "test", "predict")


def refused(call: Any, *args: Any) -> str | None:
    """The one line with which a call refuses its arguments, or None."""
    try:
        call(*args)
    except UserError as error:
        said = str(error)
        assert said.strip(), "an error without a word"
        assert "\n" not in said.strip(), said
        assert len(said) < 8000, said
        return said
    return None


def settle(command: str, argv: list[str]) -> None:
    check(command, resolve([command, *argv]))


@pytest.mark.slow
@examples(5)
@given(st.sampled_from(COMMANDS), flags)
def test_command_lines(command: str, given: list[tuple[str, str]]) -> None:
    argv = ["--data", "Synthetic", *(part for flag, value in given for part in (f"--{flag}", value))]
    said = refused(settle, command, argv)
    names = [part for flag, _ in given for part in flag.split(".")]
    values = [value[:20] for _, value in given]
    assert said is None or any(part in said for part in [*names, *filter(None, values)]), f"{argv}: {said}"


trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
sections = st.sampled_from(["trainer", "model", "data", "run", "cluster", "seed_everything", "best_checkpoint", "nope"])
settings_of = st.dictionaries(st.sampled_from([flag.rpartition(".")[2] for flag in FLAGS]) | st.text(max_size=8), trees)
configs = st.dictionaries(sections, trees | settings_of, max_size=3)


@pytest.mark.slow
@examples(2)
@given(configs, st.booleans())
def test_configs(tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any], as_json: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    try:
        path.write_text(json.dumps(content) if as_json else yaml.safe_dump(content, allow_unicode=True))
    except UnicodeEncodeError:
        return
    refused(settle, "fit", [*["--data", "Synthetic"] * as_json, "--config", str(path)])


experiments = st.fixed_dictionaries(
    {},
    optional={
        "name": trees | st.text(max_size=10),
        "flags": trees | st.dictionaries(st.sampled_from(FLAGS), trees, max_size=3),
        "variants": trees | st.dictionaries(st.text(max_size=5) | st.integers(), trees | settings_of, max_size=3),
        "grid": trees | st.dictionaries(st.sampled_from(FLAGS), st.lists(trees, max_size=3), max_size=3),
        "exclude": trees,
        "repeats": trees | st.integers(),
        "max_epochs": trees | st.integers(),
        "warmup_epochs": trees | st.integers(),
        "time_limit": trees | st.floats(),
        "baseline": trees,
        "quick": trees,
        "nope": trees,
    },
)


def read_experiment(path: Path) -> None:
    _, experiment, typed = parse_compare(["--experiment", str(path)])
    expand(experiment, typed)


@pytest.mark.slow
@examples(2)
@given(experiments)
def test_experiments(tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "experiment.yaml"
    try:
        path.write_text(yaml.safe_dump(content, allow_unicode=True))
    except UnicodeEncodeError:
        return
    refused(read_experiment, path)


def read_verify(argv: list[str]) -> None:
    _, prover = parse_verify(argv)
    for name, flags in prover.ways()[0].items():
        prover.variant(name, flags)


@pytest.mark.slow
@examples(1)
@given(
    st.lists(
        st.tuples(st.sampled_from(["steps", "quick", "time_limit", "json", "ways", "nope", *FLAGS]), values), max_size=3
    ),
    st.dictionaries(st.text(max_size=5) | st.integers(), trees | settings_of, max_size=2),
)
def test_ways(tmp_path_factory: pytest.TempPathFactory, given: list[tuple[str, str]], ways: dict[Any, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "ways.yaml"
    try:
        path.write_text(yaml.safe_dump(ways, allow_unicode=True))
    except UnicodeEncodeError:
        return
    argv = [part for flag, value in given for part in (f"--{flag}", value)]
    refused(read_verify, ["--data", "Synthetic", "--ways", str(path), *argv])


@pytest.mark.slow
@examples(1)
@given(
    st.lists(st.tuples(st.sampled_from(["run", "bandwidth", "latency", "devices", "nodes", "root", "nope"]), values))
)
def test_plans(given: list[tuple[str, str]]) -> None:
    refused(parse_plan, [part for flag, value in given for part in (f"--{flag}", value)])
