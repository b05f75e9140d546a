"""The Hugging Face Hub: found unreachable within seconds, where its own libraries try again for a minute."""

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

PATIENCE = 3.0  # seconds for a connection
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_changing = threading.RLock()  # held while the libraries are told to be offline
_found_offline: str | None = None  # why, meanwhile


@contextlib.contextmanager
def asking(name: str, kind: str, known: Sequence[str] = (), cache: str | None = None) -> Iterator[None]:
    """Within, transformers and datasets may look for `name` on the Hub.

    Where the Hub cannot be reached, or HF_HUB_OFFLINE is set, they look in their caches alone. A model or tokenizer that
    is not in the cache either, and a name that no repository can have, are a FileNotFoundError or a ConnectionError here.

    kind    "model", "tokenizer" or "dataset"
    known   names that are not the Hub's, for a misspelt one
    cache   the folder of the cache; None is the libraries' own
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
    """Return why no connection can be made to the Hub, or to the proxy that is set; None where one can."""
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

    thread = threading.Thread(target=connect, daemon=True)  # looking up a name has no time-out of its own
    thread.start()
    thread.join(PATIENCE + 1)
    through = f" through the proxy {way.hostname}" if proxy else ""
    return f"{url.scheme}://{url.netloc} cannot be reached{through} ({problems[0]})" if problems else None


def _is_cached(name: str, cache: str | None) -> bool:
    """Whether the cache of models has something of this repository."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(cache or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "snapshots"
    return folder.is_dir()


@contextlib.contextmanager
def _told_to_be_offline(why: str) -> Iterator[None]:
    """Within, huggingface_hub, transformers and datasets are as with HF_HUB_OFFLINE, which they read when imported."""
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
            for place in _places():  # datasets may have been imported within
                place.HF_HUB_OFFLINE = before.get(place, first)


def _places() -> list[Any]:
    return [sys.modules[name] for name in ("huggingface_hub.constants", "datasets.config") if name in sys.modules]


def _near(name: str, known: Sequence[str]) -> str:
    """Return a hint at what may be meant: a known name, or a folder beside the one that is not there."""
    place = Path(name)
    try:
        beside = [str(one) for one in place.parent.iterdir() if one.is_dir() and not one.name.startswith(".")]
    except OSError:
        beside = []
    return did_you_mean(name, [*known, *beside], " ({})", cutoff=0.75)
