"""Access to the Hugging Face Hub: an unreachable Hub is noticed in seconds; its own libraries retry for a minute."""

import contextlib
import re
import socket
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from strop._checks import did_you_mean

PATIENCE = 3.0  # seconds to wait for a connection
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_changing = threading.RLock()  # held while the libraries are set offline
_found_offline: str | None = None  # the reason, while the libraries are set offline


@contextlib.contextmanager
def asking(name: str, kind: str, known: Sequence[str] = (), cache: str | None = None) -> Iterator[None]:
    """Let transformers and datasets look for `name` on the Hub inside this context.

    If the Hub cannot be reached, or HF_HUB_OFFLINE is set, they use only their caches. Raise a ConnectionError if a
    model or tokenizer is not in the cache either, and a FileNotFoundError if no repository can have this name.

    kind    "model", "tokenizer" or "dataset"
    known   other valid names, to suggest for a misspelt one
    cache   the cache folder; None is the libraries' default
    """
    from huggingface_hub import constants

    no_folder = f"no folder is called {name!r}{_near(name, known)}"
    if not REPOSITORY.fullmatch(name) or "--" in name or ".." in name:
        raise FileNotFoundError(f"{no_folder}, and no {kind} on the Hub can have that name")
    offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else None
    why = _found_offline or offline or _why_unreachable(constants.ENDPOINT)
    if why is None:
        yield
        return
    if kind != "dataset" and not _is_cached(name, cache):
        raise ConnectionError(f"{no_folder}, and as a {kind} of the Hub it is not in the cache: {why}")
    with _told_to_be_offline(why):
        try:
            yield
        except Exception as error:
            error.add_note(f"looked for {name!r} in the cache alone: {why}")
            raise


def _why_unreachable(address: str) -> str | None:
    """Return why the Hub, or the proxy that is set, cannot be reached; None if it can."""
    url = urllib.parse.urlsplit(address)
    proxies = {} if urllib.request.proxy_bypass(url.hostname or "") else urllib.request.getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    way = urllib.parse.urlsplit(proxy if proxy is None or "//" in proxy else f"//{proxy}") if proxy else url
    problems = ["no answer"]

    def connect() -> None:
        try:
            port = way.port or (443 if way.scheme == "https" else 80)
            socket.create_connection((way.hostname or "", port), timeout=PATIENCE).close()
            problems.clear()
        except (OSError, ValueError) as error:
            problems[:] = [str(error)]

    thread = threading.Thread(target=connect, daemon=True)  # a thread, because DNS lookups have no timeout
    thread.start()
    thread.join(PATIENCE + 1)
    through = f" through the proxy {way.hostname}" if proxy else ""
    return f"{url.scheme}://{url.netloc} cannot be reached{through} ({problems[0]})" if problems else None


def _is_cached(name: str, cache: str | None) -> bool:
    """Return whether the model cache has any files of this repository."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(cache or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "snapshots"
    return folder.is_dir()


@contextlib.contextmanager
def _told_to_be_offline(why: str) -> Iterator[None]:
    """Set huggingface_hub, transformers and datasets offline in this context; HF_HUB_OFFLINE is read only on import."""
    global _found_offline
    from huggingface_hub import constants

    with _changing:
        before = {place: place.HF_HUB_OFFLINE for place in _places()}
        reason, _found_offline, first = _found_offline, why, constants.HF_HUB_OFFLINE
        for place in before:
            place.HF_HUB_OFFLINE = True
        try:
            yield
        finally:
            _found_offline = reason
            for place in _places():  # includes datasets if it was imported inside the context
                place.HF_HUB_OFFLINE = before.get(place, first)


def _places() -> list[Any]:
    return [sys.modules[name] for name in ("huggingface_hub.constants", "datasets.config") if name in sys.modules]


def _near(name: str, known: Sequence[str]) -> str:
    """Return a hint with a similar name: a known one, or a folder beside the missing one."""
    place = Path(name)
    try:
        beside = [str(one) for one in place.parent.iterdir() if one.is_dir() and not one.name.startswith(".")]
    except OSError:
        beside = []
    return did_you_mean(name, [*known, *beside], " ({})", cutoff=0.75)
