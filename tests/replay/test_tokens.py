"""Sequences of fixed length from text or token ids; what is wrong is said in one line."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPTNeoXConfig, PreTrainedTokenizerFast

from entropy_monitor.replay import ReplayError, TokenSpec
from entropy_monitor.replay.tokens import (
    cut_text,
    load_token_file,
    load_tokenizer,
    longest_sequence,
    special_tokens,
)


def letters(**special):
    """A tokenizer with one token per letter; <s> is 26, </s> 27."""
    vocabulary = {chr(97 + k): k for k in range(26)} | {"<s>": 26, "</s>": 27}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if special:
        from tokenizers.processors import TemplateProcessing

        backend.post_processor = TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 26), ("</s>", 27)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("abcdefghijklmnopqrstuvwxyz" * 4)
    return path


def test_text_is_cut_without_overlap(text):
    ids = cut_text(TokenSpec(text=str(text), length=10), letters(), None)
    assert ids.shape == (10, 10)
    assert np.array_equal(ids.ravel(), np.arange(100) % 26)


def test_what_the_tokenizer_adds_surrounds_every_sequence(text):
    tokenizer = letters(bos_token="<s>", eos_token="</s>")
    assert special_tokens(tokenizer, "auto") == ([26], [27])
    ids = cut_text(TokenSpec(text=str(text), length=10), tokenizer, None)
    assert (ids[:, 0] == 26).all()
    assert (ids[:, -1] == 27).all()
    assert np.array_equal(ids[:, 1:-1].ravel(), np.arange(ids.shape[0] * 8) % 26)


@pytest.mark.parametrize(
    ("prefix", "expected"), [("none", []), ("bos", [26]), ("3,4", [3, 4]), ("auto", [])]
)
def test_prefix(text, prefix, expected):
    tokenizer = letters()
    tokenizer.bos_token = "<s>"
    ids = cut_text(TokenSpec(text=str(text), length=10, prefix=prefix), tokenizer, None)
    assert ids[0, : len(expected)].tolist() == expected
    assert ids[0, len(expected)] == 0
    assert ids.shape[1] == 10


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"length": 500}, r"too short: 104 tokens, one sequence needs 500.*such as 32"),
        ({"length": 10, "sequences": 11}, r"gives 10 sequences of 10 tokens"),
        ({"length": 64, "prefix": "bos"}, "no beginning-of-sequence"),
        ({"length": 64, "prefix": "x"}, "auto, none, bos or token ids"),
        ({"length": 3, "prefix": "1,2"}, "leaves no room"),
        ({"length": 200}, "more than the model's 128"),
    ],
)
def test_bad_requests(text, spec, words):
    longest = 128 if spec["length"] == 200 else None
    with pytest.raises(ReplayError, match=words):
        cut_text(TokenSpec(text=str(text), **spec), letters(), longest)


def test_bad_texts(tmp_path):
    (tmp_path / "latin").write_bytes("déjà".encode("latin-1"))
    for name, words in (("latin", "UTF-8"), ("nothing", "does not exist")):
        with pytest.raises(ReplayError, match=words):
            cut_text(TokenSpec(text=str(tmp_path / name), length=4), letters(), None)


def test_length_is_the_models_up_to_2048(tmp_path):
    (tmp_path / "long").write_text("abc" * 3000)
    for longest, length in ((64, 64), (5000, 2048), (None, 2048)):
        ids = cut_text(TokenSpec(text=str(tmp_path / "long")), letters(), longest)
        assert ids.shape == (min(32, 9000 // length), length)
    assert longest_sequence(GPTNeoXConfig(max_position_embeddings=77)) == 77


def test_token_file(tmp_path):
    ids = np.arange(60, dtype=np.uint8).reshape(6, 10)
    np.save(tmp_path / "ids.npy", ids)
    path = str(tmp_path / "ids.npy")
    assert np.array_equal(load_token_file(TokenSpec(tokens=path)), ids)
    part = load_token_file(TokenSpec(tokens=path, length=4, sequences=2))
    assert np.array_equal(part, ids[:2, :4])
    with pytest.raises(ReplayError, match="6 sequences of 10; asked were 7 of 10"):
        load_token_file(TokenSpec(tokens=path, sequences=7))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (np.zeros(5, int), r"shape \(sequences, length\); got int64 \(5,\)"),
        (np.zeros((2, 5)), "integers"),
        (-np.ones((2, 5), int), ">= 0; got -1"),
        (np.zeros((0, 5), int), "got none"),
        (np.array([{"a": 1}]), "not a .npy file of numbers"),
    ],
)
def test_bad_token_files(tmp_path, content, words):
    np.save(tmp_path / "ids.npy", content)
    with pytest.raises(ReplayError, match=words):
        load_token_file(TokenSpec(tokens=str(tmp_path / "ids.npy")))


def test_one_of_text_and_tokens():
    for given in ({}, {"text": "a", "tokens": "b"}):
        with pytest.raises(ReplayError, match="either --text FILE or --tokens"):
            TokenSpec(**given)
    with pytest.raises(ReplayError, match="`--length` must be at least 3"):
        TokenSpec(text="a", length=2)


def test_folder_without_tokenizer(tmp_path):
    with pytest.raises(ReplayError, match="--tokenizer, or give token ids"):
        load_tokenizer(tmp_path)
