"""The command line: finds a command's module when it is used, and turns a user's mistake into one line and exit
status 2."""

from __future__ import annotations

import difflib
import importlib
import os
import sys

import click

from simpart import __version__
from simpart.errors import Interrupted, UserError

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "capture": ("simpart.commands.capture:capture", "Capture a model's training step as a graph."),
    "hardware": ("simpart.commands.hardware:hardware", "Devices and clusters that simpart knows."),
    "plan": ("simpart.commands.plan:plan", "Make a plan from a configuration given by hand."),
    "simulate": ("simpart.commands.simulate:simulate", "Predict step time and memory of a plan or configuration."),
    "search": ("simpart.commands.search:search", "Search for the best plan on a cluster."),
    "profile": ("simpart.commands.profile:profile", "Measure ops and links of this machine."),
    "fit": ("simpart.commands.fit:fit", "Learn kernel times from measurements."),
    "evaluate": ("simpart.commands.evaluate:evaluate", "Accuracy against published measurements."),
    "validate": ("simpart.commands.validate:validate", "Run a plan and compare with its prediction."),
}


class LazyGroup(click.Group):
    """Knows names and one-line summaries; imports a command's module when it is called or asked for help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UserError(f"unknown command {args[0]!r}; {hint}Known: {', '.join(COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="simpart")
def simpart() -> None:
    """Plan, predict and check how a PyTorch model trains when it is split over a cluster.

    Start with:  simpart search gpt:layers=12,hidden=768,heads=12 --cluster dgx-a100 --global-batch 64 -o plan.json
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 2 the user's mistake, 130 interrupted."""
    try:
        code = simpart.main(args=arguments, prog_name="simpart", standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        fail(str(error))
    except click.UsageError as error:
        where = f" (see {error.ctx.command_path} --help)" if error.ctx is not None else ""
        fail(error.format_message().rstrip(".") + where)
    except click.ClickException as error:
        fail(error.format_message())
    except (KeyboardInterrupt, click.Abort, Interrupted):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    sys.exit(code if isinstance(code, int) else 0)


def fail(message: str) -> None:
    """One line on stderr, exit status 2."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
