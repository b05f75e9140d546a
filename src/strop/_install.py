"""Error messages for missing packages, with the command that installs them."""

CHECKOUT = "in a checkout of strop: pip install -c constraints.txt"


def install_command(extra: str) -> str:
    """Return the command that installs an extra. It runs in a checkout, as strop is on no package index."""
    return f"{CHECKOUT} '.[{extra}]'"


def missing(what: str, package: str, extra: str) -> ImportError:
    """Return the error for `what`, which needs a missing package from one of strop's extras."""
    return ImportError(f"{what} needs {package}; {install_command(extra)}")
