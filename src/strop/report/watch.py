"""`strop report RUN --watch`: serve the page on localhost and update it during the run."""

import hashlib
import threading
import warnings
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from strop.report.runs import HEADER, METRICS, SAMPLES, NothingLogged
from strop.report.svg import escape

OWN_NAMES = ("127.0.0.1", "localhost", "[::1]")
HEAD = '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>strop</title>'
AGAIN = "This page looks again every two seconds."
WAITING = f"{HEAD}</head><body><p>No step has been logged yet. {AGAIN}</p></body></html>"


def version_of(folders: Sequence[Path]) -> str:
    """Return a string that changes whenever a file of the runs changes."""
    places = [place for folder in folders for place in (folder, *sorted(folder.glob("*/")))]
    files = [place / name for place in places for name in (HEADER, METRICS, SAMPLES)]
    stats = [(str(file), stat.st_size, stat.st_mtime_ns) for file in files if file.exists() and (stat := file.stat())]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


def problem_page(error: Exception) -> str:
    """Return the page for the case that the runs cannot be read or drawn."""
    told = escape(f"The report cannot be made: {error if isinstance(error, (ValueError, OSError)) else repr(error)}")
    return f'{HEAD}</head><body><p class="problem">{told}</p><p>{AGAIN}</p></body></html>'


class Watch(ThreadingHTTPServer):
    """A server of `page(version)` at / and of the current version at /version, which the page polls.

    Each version's page is made once, by one thread at a time, so `page` may keep state between calls.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], page: Callable[[str], str], port: int = 0):
        self.folders, self.page = folders, page
        self._lock = threading.Lock()
        self._made: tuple[str, int, str] = ("", 0, "")
        super().__init__(("127.0.0.1", port), Answers)

    def answer(self) -> tuple[int, str]:
        """Return the HTTP status and the page's text for the current files."""
        with self._lock:
            version = version_of(self.folders)  # read before the page is made, so that later writes count as new
            if self._made[0] != version:
                self._made = (version, *self._make(version))
            return self._made[1:]

    def _make(self, version: str) -> tuple[int, str]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about runs without logged steps
                return 200, self.page(version)
        except NothingLogged:
            return 200, WAITING
        except Exception as error:  # such as a broken line or a missing folder: show it instead of an empty reply
            return 500, problem_page(error)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Answers(BaseHTTPRequestHandler):
    server: Watch
    timeout = 30  # seconds after which a connection without a request is closed

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in OWN_NAMES:  # DNS rebinding: another site's name points here
            self.send_error(403, "only as localhost")
        elif self.path == "/version":
            self._send(200, version_of(self.server.folders), "text/plain")
        elif self.path == "/":
            self._send(*self.server.answer(), "text/html")
        else:
            self.send_error(404)

    def _send(self, status: int, text: str, kind: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing for a request."""
