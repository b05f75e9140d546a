"""Commands in this process, where another would only load everything once more."""

import sys
import warnings

import pytest

from strop.cli import main


@pytest.fixture
def strop(monkeypatch, capsys):
    """Run a command: its exit code, what it printed, and its errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["strop", *map(str, arguments)])
        monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # main changes it
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return run


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Work in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
