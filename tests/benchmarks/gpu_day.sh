#!/usr/bin/env bash
# Everything worth knowing on the first machine with one GPU: one command, under 10 minutes, no network.
#
#   tests/benchmarks/gpu_day.sh [FOLDER]      results.json, results.md and a log of each item, into FOLDER, $OUT or
#                                             runs/gpu_day; PYTHON names another interpreter than python3
set -eu
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" WANDB_MODE=disabled PYTHONUNBUFFERED=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
exec "${PYTHON:-python3}" tests/benchmarks/gpu_day.py "${1:-${OUT:-runs/gpu_day}}"
