"""What the loader does with files that cannot be read, and with the random numbers of collating."""

import io
import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from largetrain.config.vision_schema import ClassificationRun
from largetrain.data.classification import build_classification
from largetrain.data.images import BadImage
from largetrain.data.loader import LoaderError, TrainStream, evaluation_batches
from largetrain.data.order import SampleOrder
from largetrain.errors import ConfigError
from tests.unit.data.helpers import batch_of

DAMAGES = ("cut in half", "empty", "text")


class Holed(Dataset):
    """Sample i is i with a mask of 2 x 2; the ids in `bad` cannot be read."""

    def __init__(self, size=10, bad=(), on_bad_image="skip", max_bad_images=100):
        self.size, self.bad = size, set(bad)
        self.on_bad_image, self.max_bad_images = on_bad_image, max_bad_images

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index in self.bad:
            raise BadImage(f"/data/{index}.png", "it is cut")
        return {"images": torch.rand(3, 2, 2), "labels": torch.full((2, 2), index), "weight": float(index)}


class Refuses(Holed):
    def __getitem__(self, index):
        raise ConfigError(["data: a.png: label 200", "data: and another"])


class DrawsInCollate(Holed):
    def collate_fn(self, items):
        return {"noise": torch.rand(1) + random.random() + float(np.random.rand())}


class Threads(Holed):
    def __getitem__(self, index):
        return {"threads": torch.get_num_threads()}


def stream(dataset, batch, rank=0, workers=0, updates=None, **options):
    order = SampleOrder(len(dataset), batch.global_batch, 3, shuffle=options.pop("shuffle", False))
    return TrainStream(dataset, order, batch, rank, workers=workers, updates=updates, **options)


def damaged(tmp_path, damage):
    """Two class folders of 4 images, one of which is spoilt."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(4):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / name / f"{number}.png")
    path = tmp_path / "cat" / "2.png"
    buffer = io.BytesIO()
    Image.fromarray(np.random.RandomState(0).randint(0, 256, (32, 32, 3), dtype=np.uint8)).save(buffer, "PNG")
    contents = {"cut in half": buffer.getvalue()[: len(buffer.getvalue()) // 2], "empty": b"", "text": b"hello\n"}
    path.write_bytes(contents[damage])
    return path


def built(folder, **data):
    keys = {"source": str(folder), "image_size": 8, "validation": str(folder), **data}
    return build_classification(ClassificationRun(data=keys))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_image_ends_the_run_with_its_name(tmp_path, damage, workers):
    path = damaged(tmp_path, damage)
    splits = built(tmp_path)
    for batches in (
        stream(splits.train, batch_of(micro_batch=4), workers=workers, updates=2),
        evaluation_batches(splits.validation, 4, 1, 0, workers=workers),
    ):
        with pytest.raises(BadImage) as caught:
            list(batches)
        assert caught.value.path == str(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_image_is_replaced_in_training_and_left_out_of_evaluation(tmp_path, capsys, damage, workers):
    path = damaged(tmp_path, damage)
    splits = built(tmp_path, on_bad_image="skip")
    seen = [b["sample_id"].tolist() for b in stream(splits.train, batch_of(micro_batch=4), workers=workers, updates=4)]
    assert seen == [[0, 1, 3, 3], [4, 5, 6, 7]] * 2
    told = capsys.readouterr().err
    assert told.startswith(f"largetrain: data: {path} cannot be read (") and told.count("\n") == 1
    assert told.endswith("); another sample takes its place (1 of at most 100)\n")
    for _ in range(2):
        batches = list(evaluation_batches(splits.validation, 4, 1, 0, workers=workers))
        assert [b["sample_id"].tolist() for b in batches] == [[0, 1, -1, 3], [4, 5, 6, 7]]
        assert batches[0]["labels"].tolist() == [0, 0, -100, 0] and batches[1]["labels"].tolist() == [1] * 4
        assert batches[0]["valid"].tolist() == [True, True, False, True] and batches[1]["valid"].all()
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and told.endswith("); it is left out of the evaluation (1 of at most 100)\n")


def test_the_replacement_has_its_own_label_and_the_draws_of_its_own_place():
    """The same values as where it stands itself in that epoch."""
    micro = next(stream(Holed(10, bad=[2, 3]), batch_of(micro_batch=6)))
    assert micro["sample_id"].tolist() == [0, 1, 4, 4, 4, 5] and micro["weight"].tolist() == [0, 1, 4, 4, 4, 5]
    assert micro["images"][2].equal(micro["images"][4]) and micro["labels"][2].tolist() == [[4, 4], [4, 4]]
    untouched = next(stream(Holed(10), batch_of(micro_batch=6)))
    assert micro["images"][4].equal(untouched["images"][4])


def test_the_search_wraps_around():
    micro = next(stream(Holed(4, bad=[2, 3]), batch_of(micro_batch=4)))
    assert micro["sample_id"].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_ranks_take_the_same_number_of_steps(ranks):
    """The union of what the ranks see does not depend on their number."""
    batch = batch_of(data_parallel=ranks, micro_batch=6 // ranks)
    dataset = Holed(12, bad=[1, 5, 11])
    per_rank = [list(stream(dataset, batch, rank, updates=2)) for rank in range(ranks)]
    assert {len(batches) for batches in per_rank} == {2}
    seen = sorted(i for batches in per_rank for b in batches for i in b["sample_id"].tolist())
    assert seen == [0, 0, 2, 2, 3, 4, 6, 6, 7, 8, 9, 10]
    evaluated = [list(evaluation_batches(dataset, 2, ranks, rank)) for rank in range(ranks)]
    assert len({len(batches) for batches in evaluated}) == 1
    valid = [i for batches in evaluated for b in batches for i in b["sample_id"][b["valid"]].tolist()]
    assert sorted(valid) == [0, 2, 3, 4, 6, 7, 8, 9, 10]


def test_padding_and_unreadable_masks_are_ignored_whole():
    """Sample 0, which padding repeats, is itself unreadable; floats are repeated."""
    batches = list(evaluation_batches(Holed(3, bad=[0]), 2, 1, 0))
    assert [b["sample_id"].tolist() for b in batches] == [[-1, 1], [2, -1]]
    assert batches[0]["labels"].tolist() == [[[-100] * 2] * 2, [[1] * 2] * 2]
    assert batches[1]["labels"].tolist() == [[[2] * 2] * 2, [[-100] * 2] * 2]
    assert batches[1]["weight"].tolist() == [2.0, 1.0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_end_the_run(capsys, workers):
    dataset = Holed(10, bad=[1, 3, 5, 7], max_bad_images=2)
    with pytest.raises(LoaderError, match=r"/data/5\.png cannot be read \(it is cut\), .* data\.max_bad_images=2") as e:
        list(stream(dataset, batch_of(micro_batch=2), workers=workers, updates=5))
    assert "\n" not in str(e.value) and e.value.exit_code == 2
    assert [line.split()[2] for line in capsys.readouterr().err.splitlines()] == ["/data/1.png", "/data/3.png"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("most", [3, 4, 100])
def test_when_all_are_unreadable_there_is_no_endless_search(most):
    dataset = Holed(4, bad=range(4), max_bad_images=most)
    with pytest.raises(LoaderError, match="none of the 4 samples can be read" if most > 3 else "max_bad_images=3"):
        next(stream(dataset, batch_of(micro_batch=2)))
    dataset = Holed(4, bad=range(4), max_bad_images=most)
    with pytest.raises(LoaderError, match="none of the 4 samples can be read" if most > 3 else "max_bad_images=3") as e:
        list(evaluation_batches(dataset, 2, 1, 0))
    assert e.value.exit_code == 2


def test_without_the_attribute_a_bad_image_is_an_error():
    class Bare(Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            raise BadImage("/data/x.png", "why")

    with pytest.raises(BadImage, match=r"/data/x\.png"):
        next(stream(Bare(), batch_of()))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [0, 1])
def test_mistakes_found_while_loading_stay_what_they_are(workers):
    with pytest.raises(ConfigError) as caught:
        next(stream(Refuses(), batch_of(), workers=workers))
    assert caught.value.problems == ("data: a.png: label 200", "data: and another") and caught.value.exit_code == 2


@pytest.mark.timeout(60)
def test_collating_draws_from_a_stream_of_the_micro_batch():
    """Alike for any number of processes and ranks, different for each micro-batch, and the process's own unchanged."""
    dataset = DrawsInCollate(12)
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    whole = [b["noise"].item() for b in stream(dataset, batch_of(1, 2, 2), updates=6)]
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected
    assert len(set(whole)) == 12
    assert whole == [b["noise"].item() for b in stream(dataset, batch_of(1, 2, 2), workers=2, updates=6)]
    for rank in range(2):
        assert whole[rank::2] == [b["noise"].item() for b in stream(dataset, batch_of(2, 2), rank, updates=6)]


@pytest.mark.timeout(60)
def test_loader_processes_use_one_thread():
    assert next(stream(Threads(), batch_of(), workers=1))["threads"].item() == 1
