"""A sample of the fuzzer of weights; the whole run is `python -m tests.fuzz.weights`."""

from tests.fuzz import weights


def test_damaged_weights_are_refused_or_read_whole(tmp_path):
    outcomes, faults = weights.run(60, 5, tmp_path)
    assert faults == []
    assert min(outcomes["read"], outcomes["refused"]) >= 8


def test_the_fuzzer_finds_what_must_not_be(tmp_path, monkeypatch):
    def fails(path):
        raise KeyError("model/a")

    monkeypatch.setattr(weights, "weights_from", fails)
    outcomes, faults = weights.run(1, 0, tmp_path)
    assert not outcomes and "KeyError: 'model/a'" in faults[0]


def test_every_seed_is_whole(tmp_path):
    for path in weights.seeds(tmp_path):
        assert weights.attempt(path / "x.pt" if path.name == "plain" else path) == "read"
