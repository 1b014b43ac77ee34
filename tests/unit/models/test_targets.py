"""The user's own model by name: what is accepted, and that each mistake names its key."""

import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from largetrain.config.schema import LanguageRun, ModelConfig
from largetrain.config.target import check_arguments, load_target
from largetrain.errors import ConfigError
from largetrain.models.build import build_model, loss_from_output
from largetrain.models.decoder import Decoder
from tests.unit.models.specs import small_spec

USER_CODE = """
    import torch
    from torch import nn

    class Bigram(nn.Module):
        def __init__(self, vocab_size: int, *, scale: float = 1.0):
            super().__init__()
            self.table = nn.Embedding(vocab_size, vocab_size)
            self.scale = scale

        def forward(self, input_ids, labels=None):
            return self.table(input_ids) * self.scale

    class Frozen(Bigram):
        def __init__(self):
            super().__init__(3)
            self.requires_grad_(False)

    class OnlyInputs(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)

    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.LazyLinear(3)

        def forward(self, input_ids, labels):
            return self.inner(input_ids)

    class Broken(nn.Module):
        def __init__(self):
            raise TypeError("a bug of the user's own")

    def text():
        return "not a module"

    NUMBER = 7
"""


@pytest.fixture(autouse=True)
def user_folder(tmp_path, monkeypatch):
    """A current directory with the user's modules in it, not yet on sys.path, as for the console script."""
    (tmp_path / "lt_user_nets.py").write_text(textwrap.dedent(USER_CODE))
    (tmp_path / "lt_user_broken.py").write_text("import lt_user_absent\n")
    (tmp_path / "lt_user_syntax.py").write_text("def :\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("lt_user_")]:
        del sys.modules[name]


def build(target, **args):
    run = LanguageRun(model=ModelConfig(target=f"lt_user_nets:{target}", args=args))
    return build_model(SimpleNamespace(run=run, decoder=None))


def test_builds_the_decoder_without_a_target():
    spec = small_spec()
    torch.manual_seed(3)
    model = build_model(SimpleNamespace(run=LanguageRun(), decoder=spec))
    torch.manual_seed(3)
    assert isinstance(model, Decoder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), Decoder(spec).parameters(), strict=True))


def test_builds_a_users_model_from_the_current_directory():
    model = build("Bigram", vocab_size=5, scale=2.0)
    assert type(model).__name__ == "Bigram" and model.scale == 2.0 and model.table.weight.shape == (5, 5)


def test_a_dotted_name_reaches_inside():
    assert load_target("collections:OrderedDict.fromkeys", "x")("ab") == {"a": None, "b": None}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("lt_user_nets", "not of the form package.module:Name"),
        ("lt_user_nets:", "not of the form"),
        (":Bigram", "not of the form"),
        ("lt_user_nets.py:Bigram", "there is no module 'lt_user_nets.py'|'lt_user_nets' is not a package"),
        ("./nets:Bigram", "not of the form"),
        ("lt_user_missing:Bigram", "there is no module 'lt_user_missing'"),
        ("lt_user_broken:Net", "importing lt_user_broken failed: No module named 'lt_user_absent'"),
        ("lt_user_syntax:Net", "importing lt_user_syntax failed: SyntaxError"),
        ("lt_user_nets:Bigrams", "has no 'Bigrams'; did you mean 'Bigram'"),
    ],
)
def test_a_wrong_path_is_explained(path, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_target(path, "model.target")
    assert str(caught.value).startswith(f"model.target: {path!r}")


def test_wrong_arguments_name_their_keys():
    with pytest.raises(ConfigError) as caught:
        build("Bigram", vocab=5, depth=1)
    vocab, depth, missing = caught.value.problems
    assert vocab.startswith("model.args.vocab: ") and "did you mean 'vocab_size'" in vocab
    assert depth.startswith("model.args.depth: ") and "it takes: vocab_size, scale" in depth
    assert missing.startswith("model.args.vocab_size: is missing")


def test_arguments_of_an_open_signature_pass():
    check_arguments(lambda a, **rest: None, {"a": 1, "b": 2}, "m:f", "model.args")
    with pytest.raises(ConfigError, match=r"model\.args\.a: is missing"):
        check_arguments(lambda a, **rest: None, {"b": 2}, "m:f", "model.args")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("NUMBER", "is of type int, not a class or function"),
        ("text", "gives a value of type str, not a torch.nn.Module"),
        ("Frozen", "no trainable parameter"),
        ("OnlyInputs", r"called as forward\(input_ids, labels\), but too many positional arguments"),
        ("Lazy", "lazy parameters"),
    ],
)
def test_what_is_no_model_is_refused(target, message):
    with pytest.raises(ConfigError, match=message):
        build(target)


def test_a_bug_in_the_users_constructor_keeps_its_traceback():
    with pytest.raises(TypeError, match="a bug of the user's own"):
        build("Broken")


def test_logits_and_sums_reduce_alike():
    labels = torch.tensor([[1, 2, -100]])
    logits = torch.randn(1, 3, 5)
    loss_sum, count = loss_from_output(logits, labels, 2)
    expected = nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")
    torch.testing.assert_close(loss_sum, expected)
    assert count == 2
    assert loss_from_output((loss_sum, count), labels, 2) == (loss_sum, count)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (torch.zeros(()), r"a torch.float32 tensor of shape \[\]"),
        (torch.zeros(3, 5), r"tensor of shape \[3, 5\]; expected .* or logits \[1, 3, 'vocab_size'\]"),
        ((torch.zeros(()), torch.zeros(())), "float32 tensor of shape"),
        ((torch.zeros(()), 3), "a value of type int"),
        ({"loss": 1}, "returned a value of type dict"),
    ],
)
def test_another_output_is_refused(output, message):
    with pytest.raises(ConfigError, match=message):
        loss_from_output(output, torch.zeros(1, 3, dtype=torch.int64), 2)
