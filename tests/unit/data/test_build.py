"""From a resolved run to its data: sizes that fit, updates of epochs, the user's own datasets."""

import pytest

from largetrain.data.build import build_data
from largetrain.data.text import TokenDataset
from largetrain.errors import ConfigError
from tests.unit.data.helpers import Numbers, batch_of, make_tokenizer, resolved_of, run_of

HERE = "tests.unit.data.helpers"


class Sized:
    """A dataset with a size per split; None is no dataset."""

    def __init__(self, train=8, validation=4, split="train"):
        self.size = {"train": train, "validation": validation}[split]

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"value": index}


def without_validation(split):
    return Numbers(8) if split == "train" else None


def raises_inside(split):
    raise TypeError("inside the user's code")


def text_file(tmp_path, size=2000):
    (tmp_path / "a.txt").write_text("word " * (size // 5))
    return str(tmp_path / "a.txt")


def test_text_data_and_what_is_known_about_it(tmp_path):
    run = run_of(tmp_path, source=text_file(tmp_path), steps=7, seed=5)
    bundle = build_data(resolved_of(run, batch_of(2, 3)))
    assert isinstance(bundle.train, TokenDataset) and isinstance(bundle.validation, TokenDataset)
    assert (bundle.order.samples, bundle.order.global_batch, bundle.order.seed) == (len(bundle.train), 6, 5)
    assert bundle.info.total_steps == 7 and len(bundle.info.fingerprint) == 32
    assert 0.9 < bundle.info.bytes_per_token < 1
    assert any(line.startswith("7 updates of 6 samples: 0.3") for line in bundle.info.report)


def test_the_vocabulary_must_fit_the_model(tmp_path):
    with pytest.raises(ConfigError, match=r"model.vocab_size=256 is smaller than the 257 ids of data.tokenizer=bytes"):
        build_data(resolved_of(run_of(tmp_path, source=text_file(tmp_path)), vocab_size=256))
    make_tokenizer(tmp_path / "tokenizer.json", vocab_size=280)
    run = run_of(tmp_path, source=text_file(tmp_path), tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"model.vocab_size=257 is smaller than the 2\d\d ids"):
        build_data(resolved_of(run))


def test_a_global_batch_larger_than_the_data_is_refused(tmp_path):
    """Too little data is refused with the numbers found and needed."""
    run = run_of(tmp_path, source=text_file(tmp_path, 200), validation_fraction=0.1)
    with pytest.raises(ConfigError) as caught:
        build_data(resolved_of(run, batch_of(4, 2, 2)))
    assert str(caught.value) == (
        "data.source: the train split has 11 samples (181 tokens at model.seq_len=16), but one update needs 16 samples "
        "(257 tokens): 2 per rank x 2 accumulation x 4 data-parallel ranks. Add data, lower "
        "train_micro_batch_size_per_gpu or gradient_accumulation_steps in the engine JSON, or lower model.seq_len."
    )
    assert len(build_data(resolved_of(run, batch_of(1, 11))).train) == 11


@pytest.mark.parametrize(
    ("epochs", "steps", "rest"), [(1, 2, "the last 2 samples"), (2, 5, None), (0.5, 1, "the last 1 ")]
)
def test_epochs_become_updates(tmp_path, epochs, steps, rest):
    run = run_of(tmp_path, target=f"{HERE}:Numbers", args={"size": 10}, epochs=float(epochs))
    info = build_data(resolved_of(run, batch_of(2, 2))).info
    assert info.total_steps == steps and (rest is None or rest in info.report[-1])
    assert ("left out" in info.report[-1]) == (rest is not None)


def test_less_than_one_update_of_epochs_is_refused(tmp_path):
    run = run_of(tmp_path, target=f"{HERE}:Numbers", args={"size": 10}, epochs=0.1)
    with pytest.raises(ConfigError, match=r"epochs=0\.1 of 10 samples is less than one update of 4"):
        build_data(resolved_of(run, batch_of(2, 2)))


def test_the_users_dataset_is_called_for_both_splits(tmp_path):
    run = run_of(tmp_path, target=f"{__name__}:Sized", args={"train": 9, "validation": 5})
    bundle = build_data(resolved_of(run, decoder=False))
    assert (len(bundle.train), len(bundle.validation)) == (9, 5)
    assert bundle.info.fingerprint is None and bundle.info.bytes_per_token is None
    assert build_data(resolved_of(run_of(tmp_path, target=f"{__name__}:without_validation"))).validation is None


@pytest.mark.parametrize(
    ("target", "args", "told"),
    [
        (f"{HERE}:Stream", {}, "Stream is not a map-style dataset .*Iterable datasets cannot be resumed"),
        (f"{HERE}:Lists", {}, "sample 0 of the train split is a list, not a dict"),
        (f"{HERE}:Plain", {}, "split.*no such parameter"),
        (f"{HERE}:Nmbers", {}, "did you mean 'Numbers'"),
        (f"{HERE}:Numbers", {"sise": 3}, "data.args.sise: .*did you mean 'size'"),
        (f"{__name__}:Sized", {"train": 0}, "the train split is empty"),
        (f"{__name__}:Sized", {"validation": 0}, "the validation split is empty"),
        (f"{__name__}:Sized", {"train": 3}, "data.target: the train split has 3 samples, but one update needs 4"),
    ],
)
def test_unusable_targets_are_told_in_one_line(tmp_path, target, args, told):
    with pytest.raises(ConfigError, match=told) as caught:
        build_data(resolved_of(run_of(tmp_path, target=target, args=args), batch_of(2, 2)))
    assert len(caught.value.problems) == 1 and "\n" not in str(caught.value)


def test_an_error_inside_the_users_code_is_not_blamed_on_the_arguments(tmp_path):
    with pytest.raises(TypeError, match="inside the user's code"):
        build_data(resolved_of(run_of(tmp_path, target=f"{__name__}:raises_inside")))


def test_an_own_model_needs_own_data(tmp_path):
    with pytest.raises(ConfigError, match=r"needs data.target"):
        build_data(resolved_of(run_of(tmp_path, source=text_file(tmp_path)), decoder=False))
