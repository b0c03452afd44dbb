"""Random command lines, configs and experiments: each is accepted, or rejected in one line.

For a command line, this error line must contain a flag or a value.

`FAULTS=10` runs ten times as many.
"""

import os

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from app.command.configuration import resolve
from app.command.rules import check
from app.errors import UserError
from app.lab.compare.command import _parse as parse_compare
from app.lab.compare.experiment import expand

TIMES = int(os.environ.get("FAULTS", "1"))


def examples(count):
    """Return hypothesis settings for `TIMES` as many examples, the same every time."""
    return settings(
        max_examples=count * TIMES, deadline=None, database=None, derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


ODD = ["", " ", "[1,", "{a: 1}", "x" * 3000, "\u202e", "a\nb", "\t"]
ODD_WORDS = """
    -1 0 1 -0.0 0.5 1e400 -1e400 nan .inf 1e-400 100000000000000000000 null true [] {} [[1]]
        !!python/object:os.system
    *a &a ~ ' 名前 ü %s ${x} $HOME ../.. / /dev/null /proc/self/mem os.system torch.nn.Linear
        torch.optim.Adam
    app.modules.CIFARCNN Adam ddp dp cuda auto
"""
ODD += ODD_WORDS.split()
SETTINGS = {
    "trainer": """
        accelerator strategy devices num_nodes precision logger plugins max_epochs min_epochs
        max_steps min_steps
        max_time fast_dev_run limit_train_batches limit_val_batches limit_test_batches
        limit_predict_batches
        overfit_batches val_check_interval check_val_every_n_epoch callbacks num_sanity_val_steps
        log_every_n_steps
        enable_checkpointing profiler accumulate_grad_batches gradient_clip_val
        gradient_clip_algorithm deterministic
        benchmark inference_mode detect_anomaly barebones sync_batchnorm
        reload_dataloaders_every_n_epochs nope
        default_root_dir strategy.ddp_comm_hook strategy.bucket_cap_mb strategy.static_graph
        strategy.class_path
        strategy.find_unused_parameters strategy.process_group_backend strategy.start_method
        strategy.nope
    """,
    "model": """
        network loss optimizer optimizer.lr optimizer.momentum scheduler scheduler.step_size
        scheduler_interval hidden
        repeats channels_last compile matmul_precision nope
    """,
    "data": """
        like size data_seed batch_size val_size placement cache num_workers crop_padding flip
        cutout augment seed
        drop_last root nope
    """,
    "run": "name root test wandb project group tags warmup_epochs on_nonfinite nope",
    "cluster": "init_method node_rank timeout max_restarts log_dir",
    "best_checkpoint": "filename monitor mode save_top_k",
    "last_checkpoint": """
        filename monitor mode save_top_k every_n_train_steps train_time_interval every_n_epochs
        dirpath
    """,
    "lr_monitor": "logging_interval",
}
FLAGS = [f"{section}.{name}" for section, names in SETTINGS.items() for name in names.split()]
FLAGS += ["model", "data", "run", "cluster", "trainer", "seed_everything", "config", "ckpt_path"]
# no argument of a program has a null character
words = st.text(st.characters(exclude_characters="\0"), max_size=20)
values = st.sampled_from(ODD) | st.integers().map(str) | st.floats().map(str) | words
flags = st.lists(st.tuples(st.sampled_from(FLAGS), values), min_size=1, max_size=4)
COMMANDS = ("fit", "validate", "test", "predict")


def refused(call, *args):
    """Return the line with which a call rejects its arguments, or None."""
    try:
        call(*args)
    except UserError as error:
        message = str(error)
        assert message.strip(), "an error without a word"
        assert "\n" not in message.strip(), message
        assert len(message) < 8000, message
        return message
    return None


def settle(command, argv):
    check(command, resolve([command, *argv]))


@pytest.mark.slow
@examples(200)
@given(st.sampled_from(COMMANDS), flags)
def test_command_lines(command, pairs):
    argv = ["--data=Synthetic"]
    for flag, value in pairs:
        argv += [f"--{flag}", value]
    message = refused(settle, command, argv)
    names = [word for flag, _ in pairs for word in flag.split(".")]
    values = [value[:20] for _, value in pairs]
    assert message is None or any(word in message for word in [*names, *filter(None, values)]), (
        f"{argv}: {message}"
    )


trees = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(ODD),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
sections = st.sampled_from(
    ["trainer", "model", "data", "run", "cluster", "seed_everything", "best_checkpoint", "nope"]
)
settings_of = st.dictionaries(
    st.sampled_from([flag.rpartition(".")[2] for flag in FLAGS]) | st.text(max_size=8), trees
)
configs = st.dictionaries(sections, trees | settings_of, max_size=3)


experiments = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(["exclude", "baseline", "quick", "nope"], trees),
        **dict.fromkeys(["repeats", "max_epochs", "warmup_epochs"], trees | st.integers()),
        "name": trees | st.text(max_size=10),
        "flags": trees | st.dictionaries(st.sampled_from(FLAGS), trees, max_size=3),
        "variants": trees
        | st.dictionaries(st.text(max_size=5) | st.integers(), trees | settings_of, max_size=3),
        "grid": trees
        | st.dictionaries(st.sampled_from(FLAGS), st.lists(trees, max_size=3), max_size=3),
        "time_limit": trees | st.floats(),
    },
)


def read_experiment(path):
    _, experiment, typed = parse_compare([f"--experiment={path}"])
    expand(experiment, typed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("read", "contents"),
    [(lambda path: settle("fit", [f"--config={path}"]), configs), (read_experiment, experiments)],
)
@examples(100)
@given(st.data())
def test_files(tmp_path_factory, read, contents, data):
    path = tmp_path_factory.getbasetemp() / "example.yaml"
    content = yaml.safe_dump(data.draw(contents), allow_unicode=True)
    path.write_bytes(content.encode(errors="replace"))  # UTF-8 cannot encode all characters
    refused(read, path)
