"""A sample of the checkpoint fuzzer; the whole run is `python -m tests.fuzz.checkpoints`."""

import pytest

from tests.fuzz import checkpoints


@pytest.mark.parametrize("damage", checkpoints.DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_an_error_or_passed_over(tmp_path, damage):
    outcomes, faults = checkpoints.run(1, 11, tmp_path, (damage,))
    assert faults == [] and sum(outcomes.values()) == 4


def raises(place):
    raise IndexError


BROKEN = {
    "two lines": (lambda place: ("error", [f"{place.folder}\n"]), "not one line"),
    "no file": (lambda place: ("error", ["something is wrong"]), "names no file"),
    "no words": (lambda place: ("error", []), "an error without words"),
    "other contents": (lambda place: (checkpoints.NEWER, {}), "step-00000002 is not what was written"),
    "a traceback": (raises, "IndexError"),
    "a hang": (lambda place: checkpoints.time.sleep(9), "Hang"),
    "code": (lambda place: place.marker.touch() or ("error", [str(place.folder)]), "code of a file was run"),
    "outside": (
        lambda place: (place.outside / "precious").unlink(missing_ok=True) or ("error", [str(place.folder)]),
        "something outside was changed",
    ),
    "nothing found": (lambda place: ("error", [str(place.folder)]), "the previous checkpoint was not found"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_fuzzer_finds_what_must_not_be(tmp_path, monkeypatch, what):
    outcome, words = BROKEN[what]
    monkeypatch.setattr(checkpoints, "MAX_SECONDS", 1)
    monkeypatch.setattr(checkpoints, "resumed", lambda place, resume: outcome(place))
    forged = what in ("code", "outside")  # else it counts as a fault that `auto` finds nothing
    damage = checkpoints.facts_forged if forged else checkpoints.renamed
    faults = checkpoints.run(1, 11, tmp_path, (damage,))[1]
    assert len(faults) == 1 and words in faults[0]
