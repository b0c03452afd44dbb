"""The shipped files for clusters, as far as that goes without one; tests/test_slurm.py runs slurm.sbatch for real."""

import re
import subprocess

import yaml
from harness import ROOT

CLUSTER = ROOT / "configs" / "cluster"


def test_slurm_script() -> None:
    path = CLUSTER / "slurm.sbatch"
    subprocess.run(["bash", "-n", path], check=True, timeout=20)
    head, command, body = path.read_text().partition("\nexport ")
    assert command
    given = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", head, flags=re.MULTILINE))
    assert len(given) == head.count("\n#SBATCH"), "a line that is spelt otherwise"
    assert {"nodes", "ntasks-per-node", "cpus-per-task", "gres", "time", "requeue"} <= given.keys()
    assert given["signal"] == "SIGUSR1@90", "to the ranks, not to the script: no B:"
    assert given["open-mode"] == "append"
    assert "#SBATCH" not in body, "SLURM reads none below the first command"
    assert 'srun --kill-on-bad-exit=1 python -m app fit "$@"' in body


def test_kubernetes_job() -> None:
    """Names and types of the CRD kubeflow.org_pytorchjobs (training operator 1.9), and what its webhook insists on.

    Source: github.com/kubeflow/training-operator, manifests/base/crds and pkg/webhooks/pytorch.
    """
    job = yaml.safe_load((CLUSTER / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"]), "a DNS-1035 label"
    spec = job["spec"]
    assert spec.keys() <= {"elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs", "runPolicy"}
    elastic = spec["elasticPolicy"]
    assert elastic.pop("rdzvBackend") == "c10d"
    assert elastic.keys() == {"minReplicas", "maxReplicas", "maxRestarts"}
    assert all(type(value) is int for value in elastic.values())
    assert spec["runPolicy"]["cleanPodPolicy"] in ("All", "Running", "None")
    assert spec["pytorchReplicaSpecs"].keys() == {"Worker"}, "needed by an elastic policy; only Master is known besides"
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    assert worker.keys() == {"replicas", "restartPolicy", "template"}
    assert elastic["minReplicas"] <= worker["replicas"] <= elastic["maxReplicas"]
    assert worker["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    assert container["image"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    # without a Master the operator does not say how many processes: torchrun must be told
    command = container["command"]
    devices = container["resources"]["limits"]["nvidia.com/gpu"]
    assert command[:5] == ["torchrun", f"--nproc-per-node={devices}", "-m", "app", "fit"]
    assert (ROOT / next(word for word in command if word.startswith("--config")).partition("=")[2]).exists()
