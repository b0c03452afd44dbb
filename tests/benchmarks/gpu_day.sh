#!/usr/bin/env bash
# Test and measure on a bare machine with one GPU and no network.
#
#   gpu_day.sh wheels     before, where there is a network: download the wheels that such a machine lacks into .wheels
#   gpu_day.sh A          4 minutes: versions, each way to run a step, and host synchronizations
#   gpu_day.sh B          9 minutes: speed, compared with hand-written loops and the hardware's limits
#   gpu_day.sh C          9 minutes: the GPU tests, exactness, and the other commands
#   gpu_day.sh ITEM …     some of their items, or `suite`: the ordinary tests with the GPU hidden
#
# Three files go into $OUT or runs/gpu_day: results.json, results.md, logs.tar.gz. PYTHON names another interpreter than
# python3; the wheels, for Python 3.12 on Linux, are installed into it.
set -eu
cd "$(dirname "$0")/../.."
python="${PYTHON:-python3}"
missing=("jsonargparse[signatures]>=4.53" "wandb>=0.31" "pydantic>=2.10" "annotated-types>=0.7")
if [ "${1:-}" = wheels ]; then
    exec "$python" -m pip download -q -d .wheels --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 "${missing[@]}"
fi
if [ -d .wheels ]; then
    "$python" -m pip install -q --no-index --find-links .wheels "${missing[@]}"
fi
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" WANDB_MODE=disabled PYTHONUNBUFFERED=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
exec "$python" tests/benchmarks/gpu_day.py "$@"
