"""The command line: one file per command."""

import codecs
import functools
import io
import os
import sys
import warnings
from typing import Any

import typer

import strop
from strop import _trl, process_failures
from strop._checks import printable
from strop._contained import ExitError, exit_message, no_silent_exit
from strop.cli import bench, data, demo, doctor, eval, export, generate, init, report, serve, train

app = typer.Typer(
    name="strop",
    help="Post-training of language models: exact, fast, small enough to read.",
    no_args_is_help=True,
    context_settings=train.HELP,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("demo")(demo.demo)
app.add_typer(train.app, name="train")
app.command("init")(init.init)
app.add_typer(data.app, name="data")
app.command("generate")(generate.command)
app.command("eval")(eval.command)
app.command("serve")(serve.command)
app.command("export")(export.export)
app.command("report")(report.report)
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


def _escaped(error: UnicodeError) -> tuple[bytes, int]:
    """Return a character that the terminal's encoding lacks as an escape (\\xd7); raw bytes of a file name stay unchanged."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return b"".join(
        os.fsencode(c) if "\udc80" <= c <= "\udcff" else c.encode("ascii", "backslashreplace") for c in lacking
    ), error.end


def _print_error(text: str) -> None:
    """Print an error with unprintable characters escaped, since it may quote a row. Raw bytes of a file name stay."""
    print("".join(c if "\udc80" <= c <= "\udcff" else printable(c) for c in text), file=sys.stderr)


def _show(error: Exception) -> None:
    text = process_failures.format_error(error)
    _print_error(text.replace("resume=True", "--resume").replace("allow_changes=True", "--allow-changes"))


def _show_usage_error(error: Any) -> None:
    if "help" in type(error).__name__.lower():  # no arguments: the error is the help text
        error.show()
    else:
        path = getattr(getattr(error, "ctx", None), "command_path", "strop")
        _print_error(f"strop: {_hint_for_trl(error, path) or error.format_message()} ({path} --help lists all)")


def _hint_for_trl(error: Exception, path: str) -> str | None:
    """Return strop's name of the option if the flag is TRL's name for it; None for other flags."""
    flag, command = getattr(error, "option_name", None), path.rpartition(" ")[2]
    if flag is None or command not in train.ALGORITHMS:
        return None
    algorithm = train.ALGORITHMS[command].algorithm
    told = _trl.hint(flag.lstrip("-").replace("-", "_"), algorithm)
    return f"No such option: {flag}; {told}" if told else None


def main() -> None:
    """Run a command. An error is one line and a non-zero exit; --debug shows the traceback."""
    debug = "--debug" in sys.argv
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    codecs.register_error("strop-escaped", _escaped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="strop-escaped")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of transformers and datasets only on terminals
    if not debug:
        warnings.formatwarning = lambda message, *_, **__: f"strop: warning: {printable(str(message))}\n"
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            _join_others(debug)
        code = _called(arguments)
    except KeyboardInterrupt:
        process_failures.report_first(lambda: print("strop: interrupted", file=sys.stderr))
        sys.exit(130)
    except Exception as error:
        is_usage = hasattr(error, "format_message") and hasattr(error, "exit_code")  # a usage error of typer
        if debug and not is_usage:
            raise
        process_failures.report_first(functools.partial(_show_usage_error if is_usage else _show, error))
        sys.exit(error.exit_code if is_usage else 1)  # type: ignore[attr-defined]
    sys.exit(code)


def _called(arguments: list[str]) -> int | None:
    """Return the command's exit code. If user code calls exit, raise an ExitError instead of ending silently."""
    try:
        with no_silent_exit():
            return app(args=arguments, prog_name="strop", standalone_mode=False)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # the reader of our output, such as head, has left
            return 1
        raise ExitError(exit_message(error)) from error


def _join_others(debug: bool) -> None:
    """Connect with the processes that torchrun started. From then on only the first one prints."""
    from strop.distributed import world

    if not world().is_first and not debug:
        warnings.simplefilter("ignore")
        os.environ["TQDM_DISABLE"] = "1"
