"""Command `python -m app verify`: trains on one device, and again in each possible variant.

Prints the first differences, their causes, and remedies. Exit code: 0 if all variants train the
same, 1 if any differs or fails, 2 if the training on one device cannot run.
"""

from pathlib import Path

from jsonargparse import Namespace

from app.command.arguments import read_yaml
from app.command.configuration import by_name, split_flags
from app.command.parser import PlainParser
from app.errors import UserError
from app.lab.runs import CommandLine
from app.lab.verify.proof import Prover, Settings
from app.lab.verify.report import write_report
from app.monitor.loggers import claim_version
from app.system.files import write_json
from app.system.terminal import make_console

USAGE = "python -m app verify [--model my.Model] [--data my.Data] [--steps N] [--FLAG VALUE ...]"


def run(arguments: list[str]) -> int:
    """Run the verification, and write the report.

    Args:
        arguments: The arguments after `verify`.

    Returns:
        Exit code: 0 if all variants are the same training, else 1.

    Raises:
        UserError: For invalid flags, or when the training fails on one device.
        KeyboardInterrupt: On Ctrl-C, after the verdict on the variants that have run.
    """
    console = make_console()
    options, prover = _parse(arguments)
    prover.say = lambda line: console.print(line, style="dim", highlight=False)
    prover.folder = claim_version(Path(options.root, "verify"))
    try:
        verdict = prover.run()
    except (KeyboardInterrupt, SystemExit):
        if prover.results:
            prover.verdict().show(console)
        raise
    verdict.show(console)
    file = write_report(verdict, str(CommandLine(["verify", *arguments])), prover.folder)
    console.print(f"report  {file}", soft_wrap=True, highlight=False)
    if options.json is not None:
        write_json(Path(options.json), verdict.as_json())
    return int(not verdict)


def _parse(arguments: list[str]) -> tuple[Namespace, Prover]:
    """Return the options of `verify`, and a prover with the command line's flags for `fit`."""
    remaining, flags = split_flags(arguments)
    parser = PlainParser(usage=USAGE, description=__doc__)
    parser.add_argument("--root", default="runs", help="the report and its runs go to ROOT/verify")
    parser.add_argument("--json", type=str | None, help="write the result to this file, too")
    parser.add_argument(
        "--variants", type=str | None, help="YAML file of variants, NAME: {FLAG: VALUE}"
    )
    parser.add_class_arguments(Settings, skip={"variants"})
    options = parser.parse_args(remaining)
    if options.json and not Path(options.json).parent.is_dir():
        raise UserError(f"--json {options.json}: there is no such folder: create it")
    variants = {}
    if options.variants is not None:
        variants = read_yaml(options.variants, "--variants")
    for name, flags_of_variant in variants.items():
        if not isinstance(name, str) or not isinstance(flags_of_variant, dict):
            raise UserError(
                f"--variants {options.variants}: {name}: expected a name and its flags of fit, as "
                "in compare's variants"
            )
    settings = Settings(options.steps, variants, options.quick, options.bits, options.time_limit)
    return options, Prover(settings, *by_name(flags), Path(options.root))
