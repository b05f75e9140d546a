"""A character tokenizer whose files transformers' AutoTokenizer can open too."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop._types import Json

PAD, EOS = "<pad>", "<eos>"
SPECIAL = (PAD, EOS)  # ids 0 and 1; the characters follow
ONE_CHARACTER = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"


class CharTokenizer:
    """A tokenizer with one token per character of `alphabet`, and the tokens <pad> and <eos>, which no text contains.

    It has everything that strop needs: encode, decode, eos_token_id, pad_token_id, save_pretrained, from_pretrained.
    """

    pad_token, pad_token_id = PAD, 0
    eos_token, eos_token_id = EOS, 1
    bos_token_id = None
    chat_template = None

    def __init__(self, alphabet: str):
        repeated = sorted(c for c, count in Counter(alphabet).items() if count > 1)
        if not alphabet or repeated:
            found = f"{repeated[0]!r} twice" if repeated else "none"
            raise ValueError(f"alphabet must hold different characters, found {found}")
        self.alphabet = alphabet
        self._ids = {c: i for i, c in enumerate(alphabet, len(SPECIAL))}

    @property
    def vocab_size(self) -> int:
        return len(SPECIAL) + len(self.alphabet)

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of the characters. No special tokens are ever added."""
        try:
            return [self._ids[c] for c in text]
        except KeyError as error:
            found = f"found {error.args[0]!r} in {text!r:.80}"
            raise ValueError(f"text must be written in the alphabet {self.alphabet!r}, {found}") from None

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = False) -> Json:
        return {"input_ids": self.encode(text) if isinstance(text, str) else [self.encode(t) for t in text]}

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """Return the text of these ids: a list, an array or a tensor."""
        return "".join(self._token(int(i), skip_special_tokens) for i in ids)

    def batch_decode(self, rows: Any, skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in rows]

    def _token(self, i: int, skip_special_tokens: bool) -> str:
        if not 0 <= i < self.vocab_size:
            raise ValueError(f"ids must be from 0 to {self.vocab_size - 1}, found {i}")
        if i < len(SPECIAL):
            return "" if skip_special_tokens else SPECIAL[i]
        return self.alphabet[i - len(SPECIAL)]

    def save_pretrained(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": PAD}
        for name, content in ((FILE, self._to_tokenizers_format()), (CONFIG_FILE, config)):
            (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "CharTokenizer":
        """Return the tokenizer saved by `save_pretrained`, or by transformers after opening such a folder."""
        path = Path(folder) / FILE
        found = cls._from_file(path.read_bytes())
        if found is None:
            raise ValueError(f"{path} must be a character tokenizer that strop saved, found something else")
        return found

    @classmethod
    def from_folder_if_saved(cls, folder: str | Path) -> "CharTokenizer | None":
        """Return the tokenizer that `save_pretrained` wrote to the folder; None if it holds another one or none."""
        path = Path(folder) / FILE
        return cls._from_file(path.read_bytes()) if path.is_file() else None

    @classmethod
    def _from_file(cls, data: bytes) -> "CharTokenizer | None":
        """Return the tokenizer of a tokenizer.json; None if the file declares another kind of tokenizer."""
        if b'"WordLevel"' not in data:  # do not parse files of other kinds, which may have over 100,000 tokens
            return None
        try:
            content = json.loads(data)
            if content["model"]["type"] != "WordLevel" or content["pre_tokenizer"] != ONE_CHARACTER:
                return None
            vocab = content["model"]["vocab"]
            found = cls("".join(sorted(vocab, key=vocab.get)[len(SPECIAL) :]))
            if not (content["post_processor"] or {}).get("special_tokens"):
                content["post_processor"] = None  # transformers writes one that adds nothing
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        return found if found._to_tokenizers_format() == content else None

    def _to_tokenizers_format(self) -> Json:
        """Return the tokenizer in the format of the `tokenizers` package: every character is a word."""
        special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": i, "content": token, **special} for i, token in enumerate(SPECIAL)],
            "normalizer": None,
            "pre_tokenizer": ONE_CHARACTER,
            "post_processor": None,
            "decoder": {"type": "Fuse"},
            "model": {
                "type": "WordLevel",
                "vocab": {token: i for i, token in enumerate((*SPECIAL, *self.alphabet))},
                "unk_token": "<unk>",  # not in the vocabulary: an unknown character is an error there too
            },
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CharTokenizer) and other.alphabet == self.alphabet

    def __hash__(self) -> int:
        return hash(self.alphabet)

    def __repr__(self) -> str:
        return f"CharTokenizer({self.alphabet!r})"
