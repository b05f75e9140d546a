"""How a package that is missing is installed. Every message about one is made here."""

CHECKOUT = "in a checkout of strop: pip install -c constraints.txt"


def install_command(extra: str) -> str:
    """Return the command that installs an extra. strop is on no package index, so it is run in a checkout."""
    return f"{CHECKOUT} '.[{extra}]'"


def missing(what: str, package: str, extra: str) -> ImportError:
    """Return the error for `what`, which needs a package that one of strop's extras brings."""
    return ImportError(f"{what} needs {package}; {install_command(extra)}")
