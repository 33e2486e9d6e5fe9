"""The `memferry` command: train, env, probe.

Owns: argument parsing, exit status, and turning a user's mistake into one line
on stderr with status 2. Imports the heavy modules inside each command, so that
`--help`, `env` and a wrong run file answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from memferry_npu import __version__


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 done, 1 the run's own check failed, 2 a user's mistake."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["probe"]:
        # Its options belong to topology.probe.cli, which prints its own help.
        return _probe(words[1:])
    args = _parser().parse_args(words)
    if args.command == "env":
        from memferry_npu import env

        return env.main(as_json=args.json)
    _log_to_stderr(verbose=args.verbose)
    return _train(args)


def _parser() -> _Parser:
    parser = _Parser(prog="memferry", description="Train models that do not fit the accelerator.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"memferry {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{train,env,probe}")
    train = commands.add_parser("train", help="train as a YAML run file says", allow_abbrev=False)
    train.add_argument("run_file", metavar="run.yaml")
    train.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="e.g. train.steps=5")
    train.add_argument("--print-config", action="store_true", help="print the resolved run file and stop")
    train.add_argument("-v", "--verbose", action="store_true", help="log what the runtime decides")
    env = commands.add_parser("env", help="print what a bug report needs", allow_abbrev=False)
    env.add_argument("--json", action="store_true")
    commands.add_parser("probe", help="measure the links of this machine", add_help=False)
    return parser


def _train(args: argparse.Namespace) -> int:
    from memferry_npu.config import ConfigError, dump_config, load_config

    try:
        config = load_config(args.run_file, args.overrides)
        if args.print_config:
            print(dump_config(config), end="")
            return 0
        _refuse_many_ranks()
        from memferry_npu.train.loop import RunError, run
    except ConfigError as error:
        return _mistake(str(error))
    try:
        return run(config, say=lambda line: print(line, flush=True))
    except (ConfigError, RunError) as error:
        return _mistake(f"{args.run_file}: {error}")


def _probe(words: list[str]) -> int:
    try:
        probe = importlib.import_module("topology.probe.cli")
    except ModuleNotFoundError as error:
        if error.name not in ("topology", "topology.probe", "topology.probe.cli"):
            raise
        return _mistake("memferry probe: this build has no topology.probe")
    return int(probe.main(words) or 0)


def _refuse_many_ranks() -> None:
    from memferry_npu.config import ConfigError

    world = os.environ.get("WORLD_SIZE", "1")
    if world not in ("", "1"):
        raise ConfigError(
            f"WORLD_SIZE={world}: data parallel training over several ranks is not there yet; "
            "start one process (torchrun --nproc-per-node=1)"
        )


def _log_to_stderr(*, verbose: bool) -> None:
    """Show the framework's own log; the root logger belongs to the user."""
    logger = logging.getLogger("memferry")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("memferry %(levelname)s: %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose else logging.WARNING)


def _mistake(text: str) -> int:
    print(" ".join(text.splitlines()), file=sys.stderr)
    return 2
