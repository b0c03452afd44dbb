#!/usr/bin/env bash
# Test and measure on a bare machine with one GPU and no network.
#
#   gpu_day.sh wheels     before, where there is a network: download the wheels that such a machine lacks into .wheels
#   gpu_day.sh A          100 s: versions, a plain step, and host synchronizations
#   gpu_day.sh B          135 s: speed of a ResNet in each precision, and of compiled networks
#   gpu_day.sh C          300 s: exactness, the GPU tests, and the other commands
#   gpu_day.sh ITEM …     some of their items
#
# torchmetrics imports transformers where it is installed, which costs each process of an item 10 s: uninstall it before.
# Copy .wheels along, which git ignores. Its wheels, for Python 3.12 on Linux, are installed into python3, or into the
# interpreter that PYTHON names. Results go into $OUT or runs/gpu_day after each item: results.json, results.md, and the
# item's figures and log.
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
if ! "$python" -c "import jsonargparse" 2> /dev/null; then
    echo "gpu_day.sh: $python has no jsonargparse: run gpu_day.sh wheels where there is a network, and copy .wheels along" >&2
    exit 2
fi
export CUBLAS_WORKSPACE_CONFIG=:4096:8 # torch reads it once, at the first product
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" WANDB_MODE=disabled PYTHONUNBUFFERED=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
exec "$python" tests/benchmarks/gpu_day.py "$@"
