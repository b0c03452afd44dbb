"""The shipped files for clusters and sweeps; tests/test_slurm.py runs slurm.sbatch."""

import json
import os
import re
import shlex
import subprocess
import tomllib
from concurrent.futures import ThreadPoolExecutor

import yaml
from cluster.slurm import PATH
from forked import ForkServer
from harness import QUIET, ROOT, SLOW, free_port, options, output_of, record, record_of, tiny
from packaging.specifiers import SpecifierSet
from test_tracker import inspect

CLUSTER = ROOT / "configs/cluster"
SMALL = [*tiny(60, 12, accelerator="cpu", test=False), "--model.network=lenet"]


def run_nodes(command, variables):
    """Run a command on all nodes at once, each with its variables, and return their outputs.

    Raises:
        AssertionError: When a command fails.
        TimeoutExpired: When a command does not end in time.
    """
    with ThreadPoolExecutor(len(variables)) as pool:
        nodes = [
            pool.submit(
                subprocess.run, command, cwd=ROOT, timeout=100, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env={**os.environ, **PATH, **environment},
            )
            for environment in variables
        ]  # fmt: skip
    return [output_of(node.result().returncode, node.result().stdout) for node in nodes]


def test_slurm_script():
    head, command, body = (CLUSTER / "slurm.sbatch").read_text().partition("\nexport ")
    assert command
    directives = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", head, flags=re.MULTILINE))
    assert len(directives) == head.count("\n#SBATCH"), "a line that is spelt otherwise"
    assert directives["signal"] == "SIGUSR1@90", "to the ranks, not to the script: no B:"
    assert directives["open-mode"] == "append"
    assert "#SBATCH" not in body, "SLURM reads none below the first command"


def test_containers(app):
    """Both images have the Python and files that pyproject.toml needs; their commands exist.

    Sources of instructions and sections: docs.docker.com/reference/dockerfile,
    apptainer.org/docs/user/latest.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    files = ["pyproject.toml", project["readme"], *project["license-files"], "app", "configs"]
    docker = re.findall(r"^([A-Z]+) (.*)", (CLUSTER / "Dockerfile").read_text(), re.MULTILINE)
    image, *copies, install, command = (value for _, value in docker)
    version = image.removeprefix("python:").removesuffix("-slim")
    assert SpecifierSet(project["requires-python"]).contains(version)
    arguments = json.loads(command)
    assert arguments[:3] == ["python", "-m", "app"]
    app(*arguments[3:])

    apptainer = re.sub(r"#.*\n *", "", (CLUSTER / "apptainer.def").read_text())
    sections = re.split(r"%\w+\n", apptainer)
    assert sections[0].split() == ["Bootstrap:", "docker", "From:", image]
    for lines in (copies, sections[1].split("\n")):
        assert " ".join(line.rpartition(" ")[0].strip() for line in lines).split() == files
    assert all((ROOT / file).exists() for file in files)
    assert sections[2].strip() == install


@SLOW
def test_kubernetes_train_job(tmp_path):
    """The job's command trains in two pods.

    Source: github.com/kubeflow/trainer, manifests/base/crds (trainjobs.trainer.kubeflow.org) and
    pkg/runtime/framework/plugins/torch. That plugin sets the variables `PET_…`, refuses them in a
    job, and names the container `node`.
    """
    job = yaml.safe_load((CLUSTER / "trainjob.yaml").read_text())
    spec = job["spec"]
    trainer = spec["trainer"]
    variables = {entry["name"]: entry["value"] for entry in trainer["env"]}
    assert not [name for name in variables if name.startswith("PET_")], "they are reserved"
    (patch,) = spec["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (replicated["name"], container["name"]) == ("node", "node")
    limit = int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert limit < pod["terminationGracePeriodSeconds"]

    command = [
        word.replace("/shared", str(tmp_path))
        for word in trainer["command"]
        if "--data.root" not in word
    ]
    nodes = trainer["numNodes"]
    meeting = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    meeting |= {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": "1"}
    pods = [{**meeting, "PET_NODE_RANK": str(rank)} for rank in range(nodes)]
    run_nodes([*command, *SMALL, "--trainer.max_epochs=1"], pods)
    made = record(tmp_path / "runs")
    assert (made["world_size"], len(made["epochs"])) == (2, 1)


@SLOW
def test_skypilot(tmp_path):
    """The task runs on two nodes with one device each, and continues after a restart."""
    task = yaml.safe_load((CLUSTER / "sky.yaml").read_text())
    (bucket,) = task["file_mounts"].items()
    assert bucket[1]["mode"] == "MOUNT_CACHED", "metrics.csv is appended to"
    assert f"--run.root {bucket[0]} " in task["run"]
    script = task["run"].replace(bucket[0], str(tmp_path)).replace("29400", str(free_port()))
    flags = shlex.join([*task["envs"]["FLAGS"].split(), *SMALL])
    command = ["bash", "-eu", "-c", script]
    nodes = task["num_nodes"]
    machines = {"SKYPILOT_NUM_NODES": str(nodes), "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    machines["SKYPILOT_NODE_IPS"] = "\n".join(["127.0.0.1"] * nodes)
    for count in (1, 2):
        common = {**task["envs"], **machines, "FLAGS": f"{flags} --trainer.max_epochs {count}"}
        ranks = [{**common, "SKYPILOT_NODE_RANK": str(rank)} for rank in range(nodes)]
        outputs = run_nodes(command, ranks)
    assert "resuming from" in outputs[0]
    made = record(tmp_path)
    assert (made["world_size"], len(made["epochs"])) == (2, 2)
    alone = {**ranks[0], "SKYPILOT_NUM_NODES": "1", "FLAGS": "--print_config"}
    assert "num_nodes: 1" in run_nodes(command, [alone])[0]


@SLOW
def test_sweep(tmp_path):
    """A Weights & Biases agent starts three trials, runs with their own ids and flags."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args
    from wandb.sdk.lib.config_util import save_config_file_from_dict

    sweep = yaml.safe_load((ROOT / "configs/sweep.yaml").read_text())
    rates = sweep["parameters"]["model.optimizer.lr"]["values"]
    assert len(rates) == 3
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    small = options(images=60, batch_size=12, max_epochs=1, test=False)
    with ForkServer(tmp_path, limit=None) as server:
        for number, rate in enumerate(rates):
            chosen = sweep["parameters"] | {"model.optimizer.lr": {"value": rate}}
            parameters = dict(sorted(chosen.items()))  # as the server sorts them
            path = tmp_path / f"trial{number}.yaml"
            save_config_file_from_dict(str(path), parameters)
            args = create_sweep_command_args({"args": parameters})["args"]
            macros = {"${env}": ["/usr/bin/env"], "${interpreter}": ["python"], "${args}": args}
            command = []
            for macro in create_sweep_command(sweep["command"]):
                command += macros.get(macro, [macro])
            env = {
                "WANDB_MODE": "offline",
                "WANDB_RUN_ID": f"trial{number}",
                "WANDB_SWEEP_ID": "sweep",
                "WANDB_SWEEP_PARAM_PATH": str(path),
            }
            output_of(*server.run(*command[4:], *small, *QUIET, env=env))
            run = tmp_path / f"runs/sweep/version_{number}"
            made = record_of(run)
            assert (made["tracker"], made["world_size"]) == (f"trial{number}", 2)
            _, tracked = inspect(run)
            assert "val_acc" in tracked["summary"]
            assert tracked["config"]["model.optimizer.lr"] == rate, "what the agent has given"
            optimizer = tracked["config"]["model"]["init_args"]["optimizer"]
            assert optimizer["init_args"]["lr"] == rate, "what was run"
