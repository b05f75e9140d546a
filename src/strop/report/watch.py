"""`strop report RUN --watch`: the page on localhost, which follows a run as it goes on."""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from strop.report.runs import HEADER, METRICS, SAMPLES, NothingLogged

OWN_NAMES = ("127.0.0.1", "localhost", "[::1]")
WAITING = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>strop</title>'
    "</head><body><p>No step has been logged yet. This page looks again every two seconds.</p></body></html>"
)


def version_of(folders: Sequence[Path]) -> str:
    """Another text whenever a file of the runs has changed; runs in a folder of runs too."""
    places = [place for folder in folders for place in (folder, *sorted(folder.glob("*/")))]
    files = [place / name for place in places for name in (HEADER, METRICS, SAMPLES)]
    stats = [(str(file), stat.st_size, stat.st_mtime_ns) for file in files if file.exists() and (stat := file.stat())]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


class Watch(ThreadingHTTPServer):
    """Serves `page(version)` as /, and as /version what tells the page that there is something new."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], page: Callable[[str], str], port: int = 0):
        self.folders, self.page = folders, page
        super().__init__(("127.0.0.1", port), Answers)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Answers(BaseHTTPRequestHandler):
    server: Watch

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in OWN_NAMES:  # a page of elsewhere whose name leads here
            self.send_error(403, "only as localhost")
        elif self.path == "/version":
            self._send(version_of(self.server.folders), "text/plain")
        elif self.path == "/":
            version = version_of(self.server.folders)  # before the page: what comes in between is seen as new
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of runs that have logged nothing yet
                    text = self.server.page(version)
            except NothingLogged:
                text = WAITING
            self._send(text, "text/html")
        else:
            self.send_error(404)

    def _send(self, text: str, kind: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal for every look."""
