"""Token files: the formats, the vocabulary, and how little of them is read and sent to a worker."""

import json
import os
import pickle
import tracemalloc

import numpy as np
import pytest
from ensembles import rows_trained
from layouts import write_megatron
from torch import nn

from raydl import cli
from raydl.config import InputConfig
from raydl.data import load
from raydl.data.samples import DataShape
from raydl.errors import DataError
from raydl.run.evaluate import score_run
from raydl.tasks import LanguageModel


def read(source, context=4, **settings):
    return load(str(source), input=InputConfig(context=context, **settings))


def samples_of(part):
    inputs, following = part.fetch(np.arange(part.num_samples))
    assert (inputs[:, 1:] == following[:, :-1]).all()
    return inputs.tolist()


def in_fours(tokens):
    return [list(tokens[start : start + 4]) for start in range(0, len(tokens) - 4, 4)]


TOKENS = (np.arange(200) * 7 % 90 + 300).astype(np.uint16)


# formats


def test_the_folder_of_nanogpt_has_a_training_set_and_a_test_set(tmp_path):
    TOKENS.tofile(tmp_path / "train.bin")
    TOKENS[:30].tofile(tmp_path / "val.bin")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 390}))
    data = read(tmp_path)
    assert samples_of(data.train) == in_fours(TOKENS)
    assert samples_of(data.test) == in_fours(TOKENS[:30])
    assert data.train.shape == data.test.shape == DataShape((4,), 390)


def test_the_last_tenth_of_a_single_file_is_the_test_set(tmp_path):
    TOKENS.tofile(tmp_path / "tokens.bin")
    data = read(tmp_path / "tokens.bin")
    assert samples_of(data.train) == in_fours(TOKENS[:180])
    assert samples_of(data.test) == in_fours(TOKENS[180:])


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, np.uint16), (20240801, np.uint32)])
def test_the_header_of_llm_c_is_no_token(tmp_path, magic, dtype):
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, len(TOKENS)
    (tmp_path / "a.bin").write_bytes(header.tobytes() + TOKENS.astype(dtype).tobytes())
    assert samples_of(read(tmp_path / "a.bin").train) == in_fours(TOKENS[:180])


@pytest.mark.parametrize(("dtype", "code"), [(np.int32, 4), (np.uint16, 8)])
def test_the_index_of_megatron_has_the_type_of_its_tokens(tmp_path, dtype, code):
    write_megatron(tmp_path / "text_document", [TOKENS[:70], TOKENS[70:]], dtype, code)
    data = read(tmp_path)
    assert samples_of(data.train) == in_fours(TOKENS[:180])
    assert samples_of(read(tmp_path / "text_document.bin").test) == samples_of(data.test)


def test_several_files_of_a_part_are_one_sequence(tmp_path):
    np.save(tmp_path / "train_000.npy", TOKENS[:57])
    np.save(tmp_path / "train_001.npy", TOKENS[57:58].astype(np.int64))
    np.save(tmp_path / "train_002.npy", TOKENS[58:])
    np.save(tmp_path / "val_000.npy", TOKENS[:20])
    assert samples_of(read(tmp_path).train) == in_fours(TOKENS)
    assert samples_of(read(f"{tmp_path}/train_*.npy").train) == in_fours(TOKENS[:180])


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
def test_every_sample_of_token_files_is_trained_on_once_in_an_epoch(tmp_path, method):
    for number, part in enumerate(np.split(TOKENS, [50, 90])):
        part.tofile(tmp_path / f"{number}.bin")
    train = read(tmp_path).train
    task = LanguageModel(lambda shape, vocabulary: nn.Embedding(vocabulary, vocabulary))
    seen = rows_trained(train, method, task=task)
    assert seen == [(epoch, row) for epoch in (0, 1) for row in range(44)]


def test_a_run_on_token_files_that_is_resumed_ends_with_the_bits_of_one_that_was_not(tmp_path):
    (tmp_path / "set").mkdir()
    np.tile(TOKENS, 20).tofile(tmp_path / "set/train.bin")
    np.tile(TOKENS, 3).tofile(tmp_path / "set/val.bin")

    def train(name, *options):
        folder = ["--run-dir", str(tmp_path / name), "--run.progress", "none", "--workers", "0"]
        shape = ["--data", str(tmp_path / "set"), "--model", "gpt-nano", "--context", "16"]
        # A run that is extended has exchanged at its former end; with period 1 both runs do.
        fixed = ["--lr-schedule", "constant", "--optimizer.warmup", "0", "--period", "1"]
        assert cli.main(["train", *folder, *shape, *fixed, "--batch-size", "25", *options]) == 0

    train("whole", "--epochs", "2")
    train("parted", "--epochs", "1")
    train("parted", "--epochs", "2", "--resume")
    bits = [(tmp_path / n / "center.safetensors").read_bytes() for n in ("whole", "parted")]
    assert bits[0] == bits[1]
    result = json.loads((tmp_path / "parted/result.json").read_text())
    assert result["samples"] == 2 * ((20 * len(TOKENS) - 1) // 16)
    assert score_run(str(tmp_path / "parted"))["loss"] == pytest.approx(result["center_loss"])
    assert len(list((tmp_path / ".index").iterdir())) == 2, "what was found is kept beside the run"


# the vocabulary


def test_a_vocabulary_that_a_user_gives_may_be_larger_than_the_largest_token(tmp_path):
    TOKENS.tofile(tmp_path / "a.bin")
    assert read(tmp_path / "a.bin").train.shape.num_classes == 390
    assert read(tmp_path / "a.bin", vocabulary="50257").train.shape.num_classes == 50257


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", {"added_tokens": [{"id": 500, "content": "<|end|>"}],
                            "model": {"type": "BPE", "vocab": {"a": 0, "b": 499}}}),
        ("tokenizer.json", {"added_tokens": [], "model": {"vocab": [["a", -1.5]] * 501}}),
        ("vocab.json", {"model": 500, "version": 1}),
    ],
)  # fmt: skip
def test_the_folder_of_a_tokenizer_has_the_vocabulary(tmp_path, name, content):
    TOKENS.tofile(tmp_path / "a.bin")
    (tmp_path / name).write_text(json.dumps(content))
    data = read(tmp_path / "a.bin", vocabulary=str(tmp_path))
    assert data.train.shape.num_classes == 501


def test_a_token_outside_of_the_vocabulary_is_named_with_its_place(tmp_path):
    TOKENS.tofile(tmp_path / "train.bin")
    np.full(20, 390, np.uint16).tofile(tmp_path / "val.bin")
    sentence = "val.bin: token 0 is 390; tokens must be 0 to 389, by input.vocabulary 390"
    with pytest.raises(DataError, match=sentence):
        read(tmp_path, vocabulary="390")
    with pytest.raises(DataError, match=r"has no tokenizer.json or vocab.json"):
        read(tmp_path, vocabulary=str(tmp_path))


def test_the_largest_token_is_looked_for_once_while_the_file_stays_the_same(tmp_path):
    path, kept = tmp_path / "a.bin", str(tmp_path / "kept")
    TOKENS.tofile(path)
    assert read(path, index_dir=kept).train.shape.num_classes == 390
    before = path.stat()
    (TOKENS + 10).tofile(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read(path, index_dir=kept).train.shape.num_classes == 390, "not read again"
    os.utime(path)
    assert read(path, index_dir=kept).train.shape.num_classes == 400


# how little is read and sent


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A token file of 64 MB."""
    path = tmp_path_factory.mktemp("large") / "a.bin"
    np.tile(TOKENS, (32 << 20) // len(TOKENS)).tofile(path)
    return path


def test_a_token_file_is_never_in_memory_as_a_whole(large):
    tracemalloc.start()
    data = read(large, context=1024)
    data.train.fetch(np.arange(0, data.train.num_samples, 1000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 24 << 20


def test_a_worker_receives_the_name_of_a_token_file_and_reads_it_itself(large):
    data = read(large, context=1024)
    rows = np.array([0, 17, data.train.num_samples - 1])
    before = data.train.fetch(rows)
    pickled = pickle.dumps(data)
    assert len(pickled) < 10_000
    again = pickle.loads(pickled).train.fetch(rows)
    assert all((a == b).all() for a, b in zip(before, again, strict=True))


def test_a_token_file_can_be_read_at_the_start_for_workers_that_do_not_have_it(tmp_path):
    TOKENS.tofile(tmp_path / "a.bin")
    mapped, read_whole = read(tmp_path / "a.bin"), read(tmp_path / "a.bin", stream="never")
    assert samples_of(mapped.train) == samples_of(read_whole.train)
    sent = pickle.dumps(read_whole)
    (tmp_path / "a.bin").unlink()
    assert samples_of(pickle.loads(sent).train) == in_fours(TOKENS[:180])


# files that are not tokens, or not whole


def bytes_of(numbers, dtype):
    return np.asarray(numbers).astype(dtype).tobytes()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (bytes_of(TOKENS, "<u2")[:-1], "has 399 bytes: it ends within a token of uint16"),
        (b"", "is empty"),
        ("Grüße, Welt. ".encode() * 1000, "is a text, not tokens; give it as text:"),
        (bytes_of(np.arange(1000) * 100, "<u4"), "seems to hold numbers of 32 bits, but tokens in"),
        (b"PK\x03\x04" + bytes(100), "got an archive"),
        (bytes_of([20240520, 1, 999] + [0] * 253, "<i4") + bytes_of(TOKENS, "<u2"),
         "must hold 999 tokens by its index, got 200"),
    ],
)  # fmt: skip
def test_a_bin_that_is_something_else_is_refused_by_its_bytes(tmp_path, content, sentence):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(DataError, match=sentence):
        read(tmp_path / "a.bin")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda index: b"TNTIDX" + index[6:], "is not an index of Megatron"),
        (lambda index: index[:20], "is cut off: it has 20 of"),
        (lambda index: index[:-30], "is cut off: it has 52 of 82 bytes"),
        (lambda index: index[:17] + b"\x06" + index[18:], "tells of numbers of type 6"),
    ],
)
def test_a_damaged_index_of_megatron_is_told_in_one_sentence(tmp_path, damage, sentence):
    write_megatron(tmp_path / "a", [TOKENS[:70], TOKENS[70:]])
    index = tmp_path / "a.idx"
    index.write_bytes(damage(index.read_bytes()))
    with pytest.raises(DataError, match=f"a.idx: {sentence}"):
        read(tmp_path / "a.bin")


def test_a_bin_that_is_shorter_than_its_index_says_is_refused(tmp_path):
    write_megatron(tmp_path / "a", [TOKENS])
    (tmp_path / "a.bin").write_bytes(bytes_of(TOKENS[:150], "<i4"))
    with pytest.raises(DataError, match="must hold 200 tokens by its index, got 150"):
        read(tmp_path / "a.bin")


@pytest.mark.parametrize(
    "content",
    [bytes_of(np.arange(1000) % 65, "<u2"), "to be or not to be. ".encode("utf-16-le") * 50],
)
def test_tokens_and_utf_16_that_are_given_as_a_text_are_refused_by_their_bytes(tmp_path, content):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"is not a text in UTF-8: byte [01] is 0, as in UTF-16"):
        read(tmp_path / "a.txt")


def test_a_test_set_that_is_too_short_for_a_sample_is_named(tmp_path):
    TOKENS.tofile(tmp_path / "train.bin")
    TOKENS[:4].tofile(tmp_path / "val.bin")
    with pytest.raises(DataError, match=r"4 tokens of .*val.bin \(test\) are less than one sample"):
        read(tmp_path)
