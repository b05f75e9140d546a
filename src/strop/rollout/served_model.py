"""The model behind `strop serve`: its name, its adapters, its tokenizer, its sampling queue, and changes of its
weights.
"""

import contextlib
import functools
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from strop._types import Json
from strop.data.tool_calls import Call, CallFormat, call_format
from strop.models import Policy, load_model, unwrapped
from strop.models.kinds import adapter_off, is_peft
from strop.rollout.grammar import Grammars
from strop.rollout.sampling import Sampling
from strop.rollout.sampling_queue import SamplingQueue

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")  # files of an adapter saved by peft
LONGEST_TOKEN = 64  # maximum characters of a token, if the tokenizer does not list its tokens
ToolCall = Call
LONGEST_TEXT = 1 << 23  # maximum characters of a prompt, if the model does not state its maximum length


class RequestError(ValueError):
    """A refused request. `status` is the HTTP status of the answer."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


class ServedModel:
    """A model, its adapters and its sampling queue. Weights change only between requests.

    name           the model's name in requests
    sync_folder    weights and adapters are loaded only from folders inside this one; None is this machine's folder for
                   temporary files, where a trainer on this machine writes them
    max_batch      maximum number of rows decoded together; None chooses by the device
    parse_calls    parses the tool calls of a reply; None reads them in the format of the chat template
    queue          draws completions; None makes a `SamplingQueue`
    sampling       defaults of a request's options; None is OpenAI's
    """

    def __init__(
        self,
        policy: Policy,
        name: str,
        *,
        sync_folder: str | Path | None = None,
        max_batch: int | None = None,
        parse_calls: Callable[[str], list[Call]] | None = None,
        queue: SamplingQueue | None = None,
        sampling: Sampling | None = None,
    ):
        self.sampling = sampling
        self.policy, self.name, self.parse_calls = policy, name, parse_calls
        self.sync_folder = Path(sync_folder or tempfile.gettempdir()).resolve()
        self.adapters: list[str] = []
        self.queue = queue or SamplingQueue(policy, max_batch, self.use)
        self._loading = threading.Lock()

    def close(self) -> None:
        self.queue.close()

    def list_models(self) -> Json:
        """Return the answer to /v1/models."""
        about = {"object": "model", "created": 0, "owned_by": "strop", "max_model_len": self.policy.max_length}
        base = [{"id": self.name, **about, "parent": None}]
        return {"object": "list", "data": base + [{"id": one, **about, "parent": self.name} for one in self.adapters]}

    def check_name(self, name: object) -> None:
        """Raise unless the name is the model's or an adapter's. None is the model itself."""
        if name is not None and name not in (self.name, *self.adapters):
            there = ", ".join(f"`{one}`" for one in (self.name, *self.adapters))
            raise RequestError(f"The model {f'`{name}`':.80} does not exist. This server has {there}.", 404)

    @contextlib.contextmanager
    def use(self, name: str | None) -> Iterator[Policy]:
        """Yield the policy with this adapter, or without any. Only for the queue's thread."""
        self.check_name(name)
        model: Any = unwrapped(self.policy.model)
        if name in self.adapters:
            model.set_adapter(name)
        with adapter_off(model) if self.adapters and name not in self.adapters else contextlib.nullcontext():
            yield self.policy

    # ---- text ----

    @functools.cached_property
    def call_format(self) -> CallFormat:
        """How the chat template writes tool calls. Raises ValueError if they cannot be read."""
        return call_format(self.policy.tokenizer)

    def calls(self, reply: str, tools: Sequence[Json]) -> list[Call]:
        """Return the tool calls of a reply. A reply with an invalid call has none: it is a text."""
        parse = self.parse_calls
        found = self.call_format.parse(reply, tools) if parse is None else parse(reply)
        return [] if any(call.error for call in found) else found

    @functools.cached_property
    def grammars(self) -> Grammars:
        """The maker of grammars for this model's tokens."""
        return Grammars(self.policy.tokenizer, self.policy.vocab_size, self.policy.eos_ids)

    def decode(self, ids: list[int], special_tokens: bool = False) -> str:
        """Return the text of the ids; "" without a tokenizer."""
        tokenizer = self.policy.tokenizer
        if tokenizer is None:
            return ""
        try:
            return tokenizer.decode(ids, skip_special_tokens=not special_tokens)
        except TypeError:  # a tokenizer whose decode takes ids alone
            return tokenizer.decode(ids)

    @functools.cached_property
    def max_characters(self) -> int:
        """The maximum characters of a prompt: a longer text certainly has more tokens than the model reads."""
        if self.policy.max_length is None:
            return LONGEST_TEXT
        get_vocab = getattr(self.policy.tokenizer, "get_vocab", None)
        longest = LONGEST_TOKEN if get_vocab is None else max(map(len, get_vocab()), default=1)
        return min(LONGEST_TEXT, self.policy.max_length * longest)

    # ---- weights ----

    def synced_folder(self, name: str, path: str) -> Path:
        """Return the resolved folder of this path.

        Raise unless it and all its files lie in `sync_folder`, after following links.
        """
        found = Path(path)
        folder = found.resolve()
        if not found.is_absolute() or not folder.is_relative_to(self.sync_folder):
            raise RequestError(
                f"{name} must be a folder in {self.sync_folder} (--sync-folder), found {path!r:.200}", 403
            )
        if not folder.is_dir():
            raise RequestError(f"{name} must be a folder, found none at {path!r:.200}")
        for file in folder.rglob("*"):
            if not file.resolve().is_relative_to(self.sync_folder):
                raise RequestError(f"{name} must hold no links out of {self.sync_folder}, found {file.name!r:.80}", 403)
        return folder

    def reload_weights(self, weights_path: str) -> None:
        """Load other weights into the model in place, so that its engine and graphs stay valid."""
        folder = self.synced_folder("weights_path", weights_path)
        own = next(self.policy.model.parameters())
        with self._loading:
            new, _ = load_model(str(folder), dtype=own.dtype, device=own.device)
            self.queue.call(lambda: self._load_state(new))

    def _load_state(self, new: Any) -> None:
        base = unwrapped(self.policy.model)
        if is_peft(base):
            raise RequestError("weights must be loaded before any adapter, found one")
        own_shapes, new_shapes = ({k: w.shape for k, w in m.state_dict().items()} for m in (base, new))
        if odd := sorted({name for name, _ in own_shapes.items() ^ new_shapes.items()}):  # before anything is changed
            raise RequestError(f"weights_path must hold the weights of {self.name}, found other ones at {odd[0]}")
        base.load_state_dict(new.state_dict())

    def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter saved by peft, as a further model with this name."""
        folder = self.synced_folder("lora_path", path)
        if missing := [one for one in ADAPTER_FILES if not (folder / one).is_file()]:
            raise RequestError(f"Loading lora {name} failed: there is no {missing[0]} in {path}", 404)
        self.queue.call(lambda: self._load_adapter(name, str(folder)))

    def _load_adapter(self, name: str, path: str) -> None:
        import peft

        if name in (self.name, *self.adapters):
            raise RequestError(f"lora_name must be a new one, found {name!r:.80}")
        model: Any = unwrapped(self.policy.model)
        had_others = is_peft(model)
        try:  # read the configuration first, so that errors in it are found before a layer is replaced
            config = peft.PeftConfig.from_pretrained(path)
            weights = peft.load_peft_weights(path, device=str(self.policy.device))
            if had_others:
                model.add_adapter(name, config)
            else:
                model = peft.get_peft_model(model, config, adapter_name=name)
            result: Any = peft.set_peft_model_state_dict(model, weights, adapter_name=name)
            if result.unexpected_keys:
                raise ValueError(f"it has weights of other layers, {result.unexpected_keys[0]}")
        except Exception as error:  # peft raises errors of every kind
            if had_others and name in model.peft_config:
                model.delete_adapter(name)
            elif not had_others and is_peft(model):
                self._use_policy(Policy(model.unload(), self.policy.tokenizer))
            raise RequestError(f"Loading lora {name:.80} failed: {error}", 404) from None
        self._use_policy(Policy(model.eval(), self.policy.tokenizer))
        self.adapters.append(name)

    def unload_adapter(self, name: str) -> None:
        self.queue.call(lambda: self._unload_adapter(name))

    def _unload_adapter(self, name: str) -> None:
        if name not in self.adapters:
            raise RequestError(f"The lora adapter {name!r:.80} cannot be found.", 404)
        self.adapters.remove(name)
        model: Any = unwrapped(self.policy.model)
        if self.adapters:
            model.set_adapter(self.adapters[0])  # peft warns when the adapter in use is deleted
            model.delete_adapter(name)
        else:  # this was the last adapter: restore the model below
            self._use_policy(Policy(model.unload(), self.policy.tokenizer))

    def _use_policy(self, policy: Policy) -> None:
        self.policy = self.queue.policy = policy
