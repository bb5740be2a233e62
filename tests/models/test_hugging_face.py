"""A model of transformers is read from a local folder, and its center is written as one."""

import json
import pickle
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import raydl
from raydl import cli
from raydl.data.samples import part_of
from raydl.errors import ConfigError
from raydl.models import hugging_face
from raydl.models.hugging_face import LocalModel
from raydl.tasks import HuggingFace, LossFromForward, evaluate

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a classifier and of a language model, as save_pretrained writes them."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
    )

    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("models")
    small = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForSequenceClassification(BertConfig(**small, intermediate_size=32)).save_pretrained(
        root / "bert"
    )
    (root / "bert/vocab.txt").write_text("one\n")
    gpt = GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    GPT2LMHeadModel(gpt).save_pretrained(root / "gpt")
    return root


@pytest.fixture
def table(tmp_path):
    """Rows of tokens, whose label is whether the first token is 7."""
    tokens = torch.randint(8, 32, (240, 6), generator=torch.Generator().manual_seed(0))
    tokens[::2, 0] = 7
    labels = (tokens[:, 0] == 7).long()
    columns = {"input_ids": tokens.tolist(), "labels": labels.tolist()}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=40)
    return str(tmp_path / "rows.parquet")


@pytest.mark.processes  # the import of transformers takes seconds
def test_a_classifier_is_trained_and_its_center_loads_as_a_folder(folders, table, tmp_path, capsys):
    from transformers import AutoModelForSequenceClassification

    run = tmp_path / "run"
    options = ["--model", f"hf:{folders}/bert", "--data", table, "--workers", "0", "--epochs", "12"]
    options += ["--batch-size", "12", "--optimizer", "adamw", "--lr", "5e-3", "--run-dir", str(run)]
    assert cli.main(["train", *options, "--run.progress", "none"]) == 0
    accuracy = json.loads((run / "result.json").read_text())["center_accuracy"]
    assert accuracy > 0.95
    loaded = AutoModelForSequenceClassification.from_pretrained(run / "model").state_dict()
    center = raydl.Result.from_path(str(run)).checkpoint.to_state_dict()
    assert loaded.keys() == center.keys()
    assert all(torch.equal(loaded[name], center[name]) for name in center)
    assert (run / "model/vocab.txt").read_text() == "one\n"
    capsys.readouterr()
    assert cli.main(["evaluate", str(run)]) == 0  # without --trust: no code of the folder runs
    assert json.loads(capsys.readouterr().out)["accuracy"] == accuracy
    again = [*options[2:], "--model", f"hf:{run}/model", "--run-dir", str(tmp_path / "again")]
    assert cli.main(["train", *again, "--epochs", "1", "--run.progress", "none"]) == 0


@pytest.mark.processes
def test_a_language_model_predicts_its_own_tokens(folders):
    task = HuggingFace(f"hf:{folders}/gpt")
    model = task.build_model(None)
    assert model.training
    tokens = torch.randint(0, 32, (4, 8))
    loss = task.loss(model.eval(), {"input_ids": tokens})
    expected = LossFromForward(lambda: model).loss(model, {"input_ids": tokens, "labels": tokens})
    assert torch.equal(loss, expected)
    scores = evaluate(task, model, lambda *_: {"input_ids": tokens}, num_samples=4, batch_size=4)
    assert scores == {"loss": pytest.approx(loss.item())}
    with pytest.raises(ConfigError, match="must give batches by column"):
        task.loss(model, (tokens, tokens))


@pytest.mark.processes
def test_a_column_named_label_is_used_as_labels(folders):
    task = HuggingFace(f"hf:{folders}/bert")
    model = task.build_model(None).eval()
    tokens, label = torch.randint(0, 32, (4, 8)), torch.tensor([0, 1, 1, 0])
    scores = task.metrics(model, {"input_ids": tokens, "label": label})
    assert scores == task.metrics(model, {"input_ids": tokens, "labels": label})
    assert scores.keys() == {"loss", "accuracy"}


@pytest.mark.processes
def test_without_the_folder_of_the_model_its_configuration_is_used(folders, tmp_path):
    shutil.copytree(folders / "bert", tmp_path / "bert")
    task = HuggingFace(f"hf:{tmp_path}/bert")
    here = task.build_model(None)
    shutil.rmtree(tmp_path / "bert")
    there = pickle.loads(pickle.dumps(task)).build_model(None)
    shapes = [{k: v.shape for k, v in model.state_dict().items()} for model in (here, there)]
    assert shapes[0] == shapes[1]
    assert there.training


@pytest.mark.processes
@pytest.mark.parametrize("name", ["BertForNothing", "BertTokenizer", "AutoModel"])
def test_an_architecture_that_transformers_does_not_have_is_refused(folders, tmp_path, name):
    config = json.loads((folders / "bert/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    with pytest.raises(ConfigError, match=f"is a {name}, which is no model of transformers"):
        LocalModel(str(tmp_path)).build()


@pytest.mark.processes
def test_weights_in_a_pickle_are_refused_with_advice(folders, tmp_path):
    folder = tmp_path / "bert"
    shutil.copytree(folders / "bert", folder)
    (folder / "adapter_config.json").write_text("{}")
    torch.save({}, folder / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"no adapter_model\.safetensors, and pickled weights"):
        LocalModel(str(folder)).build()
    (folder / "adapter_config.json").unlink()
    weights = LocalModel(str(folder)).build().state_dict()
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors, and .*; .* with save_pretrained$"):
        LocalModel(str(folder)).build()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, r"must be a local folder with a config\.json, .*: hf download NAME --local-dir"),
        ("{}", r"must name one architecture in its config\.json"),
        ('{"architectures": ["A", "B"]}', "must name one architecture"),
        ("{", "must name one architecture"),
    ],
)
def test_a_folder_without_a_model_is_refused_before_anything_starts(tmp_path, content, sentence):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        raydl.Trainer(f"hf:{tmp_path}", "digits")


def test_without_transformers_the_error_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"architectures": ["A"]}')

    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(hugging_face.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[transformers\]'"):
        LocalModel(str(tmp_path)).build()


def _small_models():
    """Return tiny models, by the kind of their loss."""
    import transformers as hf

    bert = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    one = hf.BertConfig(**bert, intermediate_size=32, num_labels=1)
    bert = hf.BertConfig(**bert, intermediate_size=32, num_labels=3)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    bart = hf.BartConfig(vocab_size=32, d_model=16, max_position_embeddings=16, **sizes, **heads)
    t5 = hf.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    gpt = hf.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    llama = hf.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    return {
        "shifted": hf.GPT2LMHeadModel(gpt),
        "shifted by the usual function": hf.LlamaForCausalLM(llama),
        "a decoder whose labels the user shifts": hf.BartForCausalLM(bart),
        "sequence to sequence": hf.T5ForConditionalGeneration(t5),
        "masked": hf.BertForMaskedLM(bert),
        "a class per token": hf.BertForTokenClassification(bert),
        "a class per sample": hf.BertForSequenceClassification(bert),
        "a number per sample": hf.BertForSequenceClassification(one),
    }


def _labels_for(kind, tokens):
    generator = torch.Generator().manual_seed(1)
    if kind == "a number per sample":
        return torch.rand(len(tokens), generator=generator)
    if kind == "a class per sample":
        return torch.tensor([0, -100, 2, 1, -100, 2])
    high = 3 if kind == "a class per token" else 32
    labels = torch.randint(0, high, tokens.shape, generator=generator)
    ignored = torch.rand(tokens.shape, generator=generator) < torch.arange(6)[:, None] / 6
    ignored[5, 1:] = True  # only its first label, which a shifted loss does not count
    ignored[5, 0] = False
    return labels.masked_fill(ignored, -100)


@pytest.mark.processes
@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_model_of_transformers_counts_is_what_its_loss_is_a_mean_over(compiled):
    tokens = torch.randint(1, 32, (6, 8), generator=torch.Generator().manual_seed(0))
    for kind, model in _small_models().items():
        model.eval()
        task = LossFromForward(lambda m=model: torch.compile(m, backend="eager") if compiled else m)
        task.build_model(None)
        batch = {"input_ids": tokens, "labels": _labels_for(kind, tokens)}
        total = count = 0.0
        for start in (0, 1, 3, 5):
            part = part_of(batch, start, {0: 1, 1: 3, 3: 5, 5: 6}[start])
            if part_count := float(task.count(part)):
                count += part_count
                total += part_count * task.loss(model, part).item()
        assert count == task.count(batch)
        assert total / count == pytest.approx(task.loss(model, batch).item(), rel=1e-5), kind
        assert model.training is False


@pytest.mark.processes
@pytest.mark.parametrize("has_labels", [True, False])
def test_the_score_of_padded_texts_does_not_depend_on_the_test_batches(folders, has_labels):
    task = HuggingFace(f"hf:{folders}/gpt")
    model = task.build_model(None).eval()
    generator = torch.Generator().manual_seed(0)
    batch = {"input_ids": torch.randint(1, 32, (30, 8), generator=generator)}
    lengths = torch.randint(1, 9, (30, 1), generator=generator)  # 1: nothing to predict
    batch["attention_mask"] = (torch.arange(8) < lengths).long()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    if has_labels:
        batch["labels"] = labels
    with torch.no_grad():
        expected = model(**{**batch, "labels": labels}).loss.item()
    for size in (1, 7, 30):
        scores = evaluate(
            task, model, lambda a, b: part_of(batch, a, b), num_samples=30, batch_size=size
        )
        assert scores == {"loss": pytest.approx(expected, rel=1e-5)}


@pytest.mark.processes
def test_the_accuracy_of_a_classifier_is_over_its_labels(folders):
    task = HuggingFace(f"hf:{folders}/bert")
    model = task.build_model(None).eval()
    tokens = torch.randint(0, 32, (4, 8))
    with torch.no_grad():
        predicted = model(input_ids=tokens).logits.argmax(1)
    label = torch.stack([predicted[0], 1 - predicted[1], torch.tensor(-100), torch.tensor(-100)])
    batch = {"input_ids": tokens, "label": label}
    for size in (1, 4):
        scores = evaluate(
            task, model, lambda a, b: part_of(batch, a, b), num_samples=4, batch_size=size
        )
        assert scores["accuracy"] == 0.5
