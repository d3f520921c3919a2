"""The command line: finds a command's module when it is used, and turns a user's mistake into one line and exit
status 2."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
from typing import NoReturn

import click

from simpart import __version__
from simpart.commands._interrupt import interrupt_ends
from simpart.errors import Interrupted, UserError

__all__ = ["COMMANDS", "run"]

COMMANDS = {
    "capture": ("simpart.commands.capture:capture", "Capture a model's training step as a graph."),
    "hardware": ("simpart.commands.hardware:hardware", "Devices and clusters that simpart knows."),
    "plan": ("simpart.commands.plan:plan", "Make a plan from a configuration given by hand."),
    "simulate": ("simpart.commands.simulate:simulate", "Predict step time and memory of a plan or configuration."),
    "search": ("simpart.commands.search:search", "Search for the best plan on a cluster."),
    "compare": ("simpart.commands.compare:compare", "Compare searchers on one problem."),
    "diff": ("simpart.commands.diff:diff", "What differs between two plans."),
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
        with interrupt_ends():
            command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UserError(f"unknown command {args[0]!r}; {hint}known commands: {', '.join(COMMANDS)}")
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


def run(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 2 the user's mistake, 130 interrupted, 141 nobody reads the output."""
    _usable_streams()
    try:
        code = simpart.main(args=arguments, prog_name="simpart", standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        fail(str(error), getattr(error, "grid", ""))
    except click.exceptions.NoArgsIsHelpError as error:
        group = error.ctx.command if error.ctx is not None else simpart
        if group is simpart:
            click.echo(error.format_message())
            sys.exit(0)
        known = ", ".join(group.list_commands(error.ctx)) if isinstance(group, click.Group) and error.ctx else ""
        fail(f"{error.ctx.command_path if error.ctx else 'simpart'} needs a command: {known}")
    except click.UsageError as error:
        where = f" (see {error.ctx.command_path} --help)" if error.ctx is not None else ""
        fail(error.format_message().rstrip(".") + where)
    except click.ClickException as error:
        fail(error.format_message())
    except (KeyboardInterrupt, click.Abort, Interrupted):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        _drop_output()
        sys.exit(141)
    except OSError as error:
        _drop_output()
        where = f" {error.filename}" if error.filename else ""
        fail(f"the system refused{where}: {error.strerror or error}; check the place, its space and permissions")
    except MemoryError:
        fail("not enough memory for a problem of this size; make it smaller (batch, micro-batches, layers or devices)")
    sys.exit(code if isinstance(code, int) else 0)


def _usable_streams() -> None:
    """A closed stream swallows what it gets, and a character that an encoding lacks is escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it lives as long as the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """What is still in the buffer of a stream that takes no more must not fail again at the end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str, picture: str = "") -> NoReturn:
    """One line on stderr, below it a picture if there is one, exit status 2."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    if picture:
        print(picture, file=sys.stderr)
    sys.exit(2)
