"""Small stand-ins that the data tests share; at module level, because loader processes may be spawned."""

import os
import random
import signal
import time
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from largetrain.config.batch import Batch
from largetrain.config.schema import LanguageRun


def batch_of(data_parallel=1, micro_batch=1, accumulation=1):
    return Batch(data_parallel, data_parallel, micro_batch, accumulation, data_parallel * micro_batch * accumulation)


def run_of(tmp_path, **data):
    top = {key: data.pop(key) for key in ("steps", "epochs", "seed") if key in data}
    return LanguageRun(data={"cache": str(tmp_path / "cache"), **data}, **top)


def resolved_of(run, batch=None, seq_len=16, vocab_size=257, decoder=True):
    """What build_data reads of a resolved run."""
    return SimpleNamespace(
        run=run,
        batch=batch or batch_of(),
        decoder=SimpleNamespace(seq_len=seq_len, vocab_size=vocab_size) if decoder else None,
        total_steps=run.steps or (None if run.epochs else 300),
    )


class Numbers(Dataset):
    """Sample i is i, with the epoch it was told, the process it was made in, and random numbers."""

    def __init__(self, size=8, split="train"):
        self.size, self.split, self.epoch = size, split, -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {
            "value": torch.tensor(index),
            "labels": torch.full((3,), index),
            "epoch": self.epoch,
            "pid": os.getpid(),
            "noise": torch.rand(2, dtype=torch.float64).sum() + random.random() + np.random.rand(),
        }


class Plain(Dataset):
    """Sample i is i; nothing else."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"value": index}


class Stream(IterableDataset):
    def __init__(self, split):
        self.split = split

    def __iter__(self):
        return iter([{"value": 1}])


class Lists(Plain):
    def __init__(self, split):
        self.split = split

    def __getitem__(self, index):
        return [index]


class BusError(Plain):
    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGBUS)
        time.sleep(30)


class Killed(Plain):
    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)


class Hangs(Plain):
    def __getitem__(self, index):
        time.sleep(60)


class Raises(Plain):
    def __getitem__(self, index):
        raise ValueError(f"sample {index} is broken")


class ShmFull(Plain):
    def __getitem__(self, index):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")


class TokenizesInWorker(Plain):
    """Encodes a batch of texts with a fast tokenizer, as a dataset that tokenizes on the fly does."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __getitem__(self, index):
        encoded = self.tokenizer.encode_batch([f"the cat {index}"] * 64)
        return {"count": sum(len(one.ids) for one in encoded), "index": index}


def make_tokenizer(path, vocab_size=300, specials=("<|endoftext|>",), text="the quick brown fox jumps over the dog "):
    """Train a small byte-level BPE and save it; returns the tokenizers object."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text * 50], trainer)
    tokenizer.save(str(path))
    return tokenizer
