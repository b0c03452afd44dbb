"""Train image classifiers with data parallelism, from one device to many nodes, by changing flags.

A module imports only from modules below it in this map; `tests/test_layout.py` checks this.

    __main__            calls cli.main
    cli                 routes a command line; maps an exception to an exit status and one line
    replay              repeats one step of a run, and prints its samples
    verify              proves that variants are the same training: recording (of a run), differences (between two
                        recordings), causes, proof (runs variants), verdict, report, command
    compare             many runs: experiment (variants), runner (separate processes), results, advice, figures,
                        report, command
    plan                predicts scaling: measure (a step), cost_model (the formulas), report, command
    doctor              tests which features work on this machine
    export              writes a trained classifier for ONNX or torch
    inference           a trained classifier in Python: load, predict
    variant             flags of fit, their resolved configuration, and commands for this machine
    fit                 fit, validate, test, predict: arguments (tokens and configs), parser, messages (of a rejected
                        flag), help, configuration (all flags), resolved (strategy, devices, processes), rules and
                        flag_rules (whether a run can work), command (launches or trains), assembly (of a Trainer),
                        outcome (exit code, closing lines), run_options (a run's folder), checkpoints,
                        checkpoint_file
    runs                starter: one training run as a function, run_fit
    callbacks           callbacks that a user may add to a run: BatchShapes
    monitor             watches one run: run_record (fills the record), step_clock, rank_times (slow ranks), balance
                        (fewer shards for slow ranks), course (time series), results (of a test or prediction),
                        nonfinite, progress_bar, loggers, header and summary (printed at the start and the end), report
                        (its page)
    launch              processes of a run: elastic (torch's agent starts them), spawn (Lightning starts them),
                        rendezvous and cluster_environment (they connect), agree (on checkpoint and folder); signals,
                        failures, watchdog and process (they end)
    parallel            strategies: data_parallel (dp), ddp, comm_hooks, traits, tree (sums over shards); importing the
                        package registers the strategies' names
    loop                straight_step (a fast training step), step_patches (Lightning's private names), shards (the
                        step over virtual devices), buffers (of the module)
    modules             LightningModules: loss, metrics, optimizer, predictions
    data                sources (data sets), image_files (the user's own), tables (CSV files, classes by name),
                        hugging_face, synthetic (drawn), geometry (sizes and crops), cache (decoded once, mapped),
                        shares (a rank's share of the global order), batches (a share's loader), global_order (for a
                        user's DataLoader), transforms (pixels), module (ImageData), datasets (--data)
    training_sums       loss, accuracy and samples of a logging window and of an epoch
    recipe              loss, parameter groups, learning-rate schedule, frozen blocks
    execution           how a network is executed: layout, precision, compilation, fused updates
    networks            the CNNs and the MLP, networks of torchvision and timm, pretrained weights
    record              the run record (run.json); words (formats its figures)
    system              machine, interconnect, files, torch_files (weights and checkpoints), page (the style of all
                        reports), terminal, random_streams, program (set-up of a process), trust (code that a config
                        may run), tracebacks (origin of an exception); and patches: lightning_patches, torch_patches,
                        wandb_patches and deferred_imports. Code elsewhere that uses a private name of a library
                        declares it with patches.expects
    errors              user errors, and exit status of a run
"""

import importlib
import os
from typing import Any

from app.system.program import set_up

__version__ = "0.1.0"

if "APP_SPAWNED" in os.environ:  # a ddp_spawn process, which does not run `app.__main__`
    set_up()


def __getattr__(name: str) -> Any:
    """Import `app.load` and `app.fit` on first use, because the imports take seconds."""
    if name not in ("load", "fit"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("app.fit") if name == "fit" else importlib.import_module("app.inference").load
