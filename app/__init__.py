"""Train image classifiers with data parallelism, from one device to many nodes, by changing flags.

A module imports only from modules below it in this map; `tests/test_layout.py` checks this.

    __main__    calls cli.main
    cli         routes a command line; maps an exception to an exit status and one line
    lab         many runs: verify (proves that variants are the same training: recording,
                differences, causes, proof, verdict, report, command), compare (variants on this
                machine: experiment, runner, results, advice, figures, report, command), replay
                (repeats one step of a run), doctor (tests this machine), overview (lists all
                runs), runs (one training run as a function: run_fit, fit), variant (flags of
                fit, their resolved configuration, and commands for this machine)
    use         a trained classifier: inference (load, predict in Python), export (for ONNX or
                torch)
    command     fit, validate, test, predict: arguments (tokens and configs), parser, messages
                (of a rejected flag), help, configuration (all flags), defaults (flags that
                follow others), resolved (strategy, devices, processes), rules and flag_rules
                (whether a run can work), run (launches or trains), live (state of a live run),
                join (a live run), rate_search (for a learning rate), assembly (of a Trainer),
                outcome (exit code, closing lines), run_options, decision (rank zero's:
                checkpoint and folder), checkpoints, checkpoint_file, contents (of a checkpoint)
    monitor     watches one run: run_record (writes the record), fill (fills it), windows
                (throughput), step_clock, rank_times (slow ranks), series (time series), results
                (of an evaluation or prediction), nonfinite, fingerprint and logged_names
                (whether ranks agree), progress_bar, loggers, header and summary (printed at the
                start and the end), image_grid (pictures of images), report (its page),
                batch_shapes (a callback for users)
    launch      processes of a run: elastic (torch's agent starts them), spawn (Lightning starts
                them), rendezvous and cluster_environment (they connect), agree (on checkpoint
                and folder), live (ranks come and go); signals, failures, watchdog and process
                (they end)
    training    step (a fast training step), hooks (that it calls), step_patches (Lightning's
                private names), virtual_devices (the step over shards), buffers (of the module),
                tree (sums over shards); strategies: data_parallel (dp), ddp, comm_hooks
    modules     LightningModules: classifier, networks, weights (pretrained), recipe (loss,
                parameter groups, schedule, frozen blocks), probe (first weights of the head),
                execution (layout, precision, compilation, fused updates), sums (of a logging
                window and of an epoch)
    data        sources (data sets), image_files (the user's own), tables (CSV files, classes by
                name), hugging_face, synthetic (drawn), geometry (sizes and crops), cache
                (decoded once, mapped), shares (a rank's share of the global order), batches
                (order, readers and loader of a share), exact_loader (for a user's DataLoader),
                transforms (pixels), placement (where images lie; workers), module (ImageData),
                datasets (--data)
    record      the run record (run.json); words (formats its figures)
    system      machine, addresses, connections, files, torch_files (weights and checkpoints),
                page (the style of all reports), terminal, random_streams, program (set-up of a
                process), trust (code that a config may run), tracebacks (origin of an
                exception); and patches: lightning_patches, torch_patches, wandb_patches and
                deferred_imports. Code elsewhere that uses a private name of a library declares
                it with patches.expects
    errors      user errors, and exit status of a run
"""

import importlib
import os
from typing import Any

from app.system.program import set_up

__version__ = "0.1.0"
# imported on first use, because the imports take seconds
_LATE = {"fit": "app.lab.runs", "load": "app.use.inference"}

if "APP_SPAWNED" in os.environ:  # a ddp_spawn process, which does not run `app.__main__`
    set_up()


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATE[name]), name)
