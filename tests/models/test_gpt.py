"""Language models are causal, tie their embeddings, and train like other models."""

import numpy as np
import pytest
import torch
from ensembles import Ensemble
from safetensors.torch import load, save
from token_sets import token_samples
from torch import nn
from torch.nn import functional

from raydl.config import MethodConfig, OptimizerConfig, TrainConfig, TrainingConfig
from raydl.core.flat import FlatModel
from raydl.errors import ShapeError
from raydl.models import GPT, MODELS
from raydl.tasks import LanguageModel

GPTS = [name for name, row in MODELS.items() if row.reads_texts]
TEXT = np.frombuffer(b"to be or not to be, that is the question. " * 12, np.uint8)


def tiny(input_shape, vocabulary):
    return GPT(input_shape, vocabulary, num_layers=2, num_heads=2, width=16)


def untrained(context=8, vocabulary=256):
    torch.manual_seed(0)
    return tiny((context,), vocabulary)


# the model


def test_the_parameters_of_gpt2_are_counted_by_hand():
    block = 2 * 2 * 768 + (769 * 3 * 768 + 769 * 768) + (769 * 4 * 768 + (4 * 768 + 1) * 768)
    assert MODELS["gpt2"].num_parameters == 50257 * 768 + 1024 * 768 + 12 * block + 2 * 768
    assert MODELS["gpt2"].num_parameters == 124_439_808


@pytest.mark.parametrize("name", GPTS)
@pytest.mark.parametrize(("context", "vocabulary"), [(1, 2), (5, 300)])
def test_a_model_fits_any_context_and_vocabulary(name, context, vocabulary):
    with torch.device("meta"):
        model = MODELS[name].build((context,), vocabulary)
        tokens = torch.zeros(2, context, dtype=torch.int64)
        assert model(tokens).shape == (2, context, vocabulary)


def test_a_later_token_never_changes_an_earlier_logit():
    model = untrained()
    tokens = torch.randint(256, (3, 8))
    before = model(tokens)
    for at in range(8):
        changed = tokens.clone()
        changed[:, at] = (changed[:, at] + 1) % 256
        after = model(changed)
        torch.testing.assert_close(after[:, :at], before[:, :at])
        assert (after[:, at:] != before[:, at:]).any(2).all()


def test_a_text_shorter_than_the_context_has_the_logits_of_a_beginning():
    model = untrained()
    tokens = torch.randint(256, (2, 8))
    torch.testing.assert_close(model(tokens[:, :3]), model(tokens)[:, :3])


def test_the_order_of_the_tokens_matters():
    model = untrained()
    here, there = (model(torch.tensor([row]))[0, -1] for row in ([1, 2, 3], [2, 1, 3]))
    assert not torch.allclose(here, there)


def test_input_and_output_embeddings_are_tied():
    model = untrained()
    names = {name for name, _ in model.named_parameters()}
    assert model.lm_head.weight is model.wte.weight
    assert "wte.weight" in names
    assert "lm_head.weight" not in names
    assert {"wte.weight", "lm_head.weight"} <= set(model.state_dict())


def test_the_first_loss_is_that_of_a_guess_among_all_tokens():
    model = MODELS["gpt-nano"].build((32,), 256)
    tokens = torch.randint(256, (4, 33))
    loss = LanguageModel().loss(model, (tokens[:, :-1], tokens[:, 1:]))
    assert loss.item() == pytest.approx(np.log(256), abs=0.1)


def test_initial_weights_follow_from_torchs_seed_and_have_the_expected_spread():
    first, again = untrained(), untrained()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=1))
    assert first.wte.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert first.h[0].mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert first.h[0].mlp.c_proj.weight.std().item() == pytest.approx(0.01, rel=0.1)


def test_pictures_are_refused_in_a_sentence():
    with pytest.raises(ShapeError, match=r"model gpt: takes texts of shape \[tokens\], got \[3"):
        tiny((3, 32, 32), 10)


def test_heads_that_do_not_divide_the_width_are_refused_in_a_sentence():
    with pytest.raises(ShapeError, match="width 16 is not a multiple of num_heads 3"):
        GPT((4,), 256, num_layers=1, num_heads=3, width=16)


# steps, exchanges and checkpoints


def test_a_step_on_flat_tensors_is_that_of_plain_pytorch():
    plain, model = untrained(), untrained()
    flat = FlatModel(model)
    batch = token_samples(TEXT, 8, 256).fetch(np.arange(4))
    for one in (plain, model):
        LanguageModel().loss(one, batch).backward()
    torch.testing.assert_close(
        flat.gradients, torch.cat([p.grad.flatten() for p in plain.parameters()])
    )
    assert flat.num_parameters == sum(p.numel() for p in plain.parameters())
    assert flat.num_buffers == 0


def train_two_workers(method, **training):
    """Return two workers that have trained on the text."""
    config = TrainConfig(
        method=MethodConfig(name=method, period=2),
        training=TrainingConfig(batch_size=8, **training),
        optimizer=OptimizerConfig(lr=0.3, momentum=0.9),
    )
    text = token_samples(TEXT, 8, 256)
    ensemble = Ensemble(config, num_workers=2, images=text, task=LanguageModel(tiny))
    ensemble.join().run()
    return ensemble


def loss_of(weights):
    """Return the loss on the text with flat weights that were written to a file and read again."""
    flat = FlatModel(untrained())
    state = load(save(flat.state_dict_of(torch.tensor(weights), flat.buffers)))
    plain = untrained()
    plain.load_state_dict(state, strict=True)
    assert plain.lm_head.weight is plain.wte.weight
    with torch.no_grad():
        inputs, following = token_samples(TEXT, 8, 256).fetch(np.arange(60))
        return functional.cross_entropy(plain(inputs).flatten(0, 1), following.flatten()).item()


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
def test_the_loss_of_the_center_falls_on_a_text_and_it_loads_into_plain_pytorch(method):
    ensemble = train_two_workers(method, epochs=40)
    before, after = loss_of(ensemble.first.weights), loss_of(ensemble.center().weights)
    assert before == pytest.approx(np.log(256), abs=0.1)
    assert after < 0.5 * before


def test_a_saved_center_has_both_names_of_the_tied_weights_and_can_be_loaded():
    flat = FlatModel(untrained())
    weights = torch.randn(flat.num_parameters)
    state = load(save(flat.state_dict_of(weights, flat.buffers)))
    assert set(state) == set(untrained().state_dict())
    assert torch.equal(state["wte.weight"], state["lm_head.weight"])
    assert torch.equal(flat.flatten(state)[0], weights)


def test_a_custom_model_can_replace_gpt():
    model = LanguageModel(lambda shape, vocabulary: nn.Embedding(vocabulary, vocabulary))
    tokens = token_samples(TEXT, 8, 256)
    assert model.loss(model.build_model(tokens.shape), tokens.fetch(np.arange(2))).shape == ()
