"""The command line: one file per command."""

import sys

import typer

import strop
from strop.cli import bench, demo, doctor

app = typer.Typer(
    name="strop",
    help="Post-training of language models: exact, fast, small enough to read.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("demo")(demo.demo)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"strop {strop.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_show_version, is_eager=True),
    debug: bool = typer.Option(False, "--debug", help="Show the whole traceback of an error."),
) -> None:
    pass


def main() -> None:
    """Errors are one line and a non-zero exit; the traceback comes with --debug."""
    debug = "--debug" in sys.argv
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    try:
        app(args=arguments, prog_name="strop")
    except KeyboardInterrupt:
        print("strop: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        print(f"strop: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
