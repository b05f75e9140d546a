"""A Hub that cannot be reached: an error within seconds that names what was asked for, and what the cache has still loads."""

import shutil
import socket
import threading
import time

import huggingface_hub.constants
import pytest
from tiny_models import llama
from tiny_tokenizers import hugging_face

from strop import _hub
from strop.data.formats import load_rows
from strop.models import load_model, loading

CLOSED = "http://127.0.0.1:9"


@pytest.fixture
def unreachable(monkeypatch, tmp_path):
    """A machine whose Hub refuses connections, with an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", CLOSED)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("load", [load_model, loading.load_tokenizer, load_rows])
def test_unreachable_hub_fails_at_once_and_names_what_was_asked_for(unreachable, load):
    import datasets
    import transformers

    assert datasets.__version__
    assert transformers.AutoModelForCausalLM  # imported before the clock starts: on a busy machine this takes long
    start = time.monotonic()
    with pytest.raises((ConnectionError, ValueError), match=r"owner/name.*127\.0\.0\.1:9 cannot be reached"):
        load("owner/name")
    assert time.monotonic() - start < 20, "the libraries try for 23 to 50 seconds"
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


def test_look_up_that_never_answers_is_left_behind(unreachable, monkeypatch):
    over = threading.Event()

    def hang(*_, **__):
        over.wait(60)
        raise OSError

    monkeypatch.setattr(_hub, "PATIENCE", 0.2)
    monkeypatch.setattr(socket, "create_connection", hang)
    with pytest.raises(ConnectionError, match=r"owner/name.*\(no answer\)"):
        load_model("owner/name")
    over.set()


def test_model_in_the_cache_loads_without_the_hub(unreachable):
    """In the layout of the Hub's cache: refs/main names the snapshot."""
    repository = unreachable / "cache" / "models--owner--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    llama().save_pretrained(snapshot)
    hugging_face().save_pretrained(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    model, tokenizer = load_model("owner/name")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert tokenizer is not None
    shutil.rmtree(repository / "snapshots" / ("0" * 40))
    with pytest.raises(OSError, match="owner/name") as raised:
        load_model("owner/name")
    assert any("cannot be reached" in note for note in raised.value.__notes__)


def test_offline_as_the_user_set_it(unreachable, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("asked for a connection"))
    with pytest.raises(ConnectionError, match=r"owner/name.*HF_HUB_OFFLINE is set"):
        load_model("owner/name")
    assert huggingface_hub.constants.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a b", "no folder is called 'a b', and no model on the Hub can have that name"),
        ("smollm3", r"did you mean 'smollm2'\?"),
        ("runs/sorr", r"did you mean 'runs/sort'\?"),
        ("sort-final", r"did you mean 'sort_final'\?"),
    ],
)
def test_misspelt_names(unreachable, name, message):
    (unreachable / "runs" / "sort").mkdir(parents=True)
    (unreachable / "sort_final").mkdir()
    with pytest.raises(OSError, match=message):
        load_model(name)


def test_no_tokenizer_of_a_new_moe():
    with pytest.raises(ValueError, match="a new moe:tiny has no tokenizer of its own"):
        loading.load_tokenizer("moe:tiny")


def test_reachable_through_a_proxy(unreachable, monkeypatch):
    """What is connected to is the proxy where one is set."""
    asked = []

    class Connection:
        def close(self):
            pass

    def connect(address, timeout):
        asked.append(address)
        return Connection()

    monkeypatch.setattr(socket, "create_connection", connect)
    assert _hub._why_unreachable("https://huggingface.co") is None
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    assert _hub._why_unreachable("https://huggingface.co") is None
    assert asked == [("huggingface.co", 443), ("proxy.example", 3128)]
