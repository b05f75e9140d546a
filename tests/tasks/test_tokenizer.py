"""The character tokenizer: ids, text, and the file."""

import json

import numpy as np
import pytest

from strop.tasks import CharTokenizer


def test_ids_by_hand():
    tokenizer = CharTokenizer("ab+")
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.vocab_size, len(tokenizer)) == (0, 1, 5, 5)
    assert tokenizer.encode("b+a") == [3, 4, 2]
    assert tokenizer(["a", "bb"]) == {"input_ids": [[2], [3, 3]]}
    assert tokenizer.decode([3, 1, 0]) == "b<eos><pad>"
    assert tokenizer.decode(np.array([3, 1, 0]), skip_special_tokens=True) == "b"
    assert tokenizer.batch_decode([[2], [3, 1]], skip_special_tokens=True) == ["a", "b"]


def test_what_it_cannot_write():
    tokenizer = CharTokenizer("ab+")
    with pytest.raises(ValueError, match=r"alphabet 'ab\+', found 'c' in 'abc'"):
        tokenizer.encode("abc")
    with pytest.raises(ValueError, match="ids must be from 0 to 4, found 5"):
        tokenizer.decode([2, 5])
    with pytest.raises(ValueError, match="different characters, found 'a' twice"):
        CharTokenizer("aba")
    with pytest.raises(ValueError, match="different characters, found none"):
        CharTokenizer("")


def test_saved_and_opened(tmp_path):
    tokenizer = CharTokenizer('0"\\é\n<')
    tokenizer.save_pretrained(tmp_path / "new" / "folder")
    assert CharTokenizer.from_pretrained(tmp_path / "new" / "folder") == tokenizer
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"hello": 0}}}')
    with pytest.raises(ValueError, match=r"tokenizer\.json must be a character tokenizer"):
        CharTokenizer.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError):
        CharTokenizer.from_pretrained(tmp_path / "nowhere")


def test_transformers_opens_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = CharTokenizer("0123456789>\n ")
    tokenizer.save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "520 14>\n"
    assert theirs.encode(text) == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.decode([*tokenizer.encode("12"), 1, 0], skip_special_tokens=True) == "12"
    assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (1, 0, len(tokenizer))
    loading = pytest.importorskip("strop.models.loading")
    assert loading.load_tokenizer(tmp_path) == tokenizer  # which names the character it cannot write
    theirs.save_pretrained(tmp_path)
    assert loading.load_tokenizer(tmp_path) == tokenizer
    config = json.loads((tmp_path / "tokenizer.json").read_text()) | {"normalizer": {"type": "Lowercase"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(config))
    assert type(loading.load_tokenizer(tmp_path)).__module__.startswith("transformers")  # not strop's any more
