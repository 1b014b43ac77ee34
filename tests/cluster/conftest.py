"""Hosts of namespaces for the tests of this folder, which are skipped where they cannot be had."""

import os
from collections.abc import Iterator

import pytest

from tests.cluster.fake_hosts import Cluster, why_not

SWITCH = "LARGETRAIN_FAKE_HOSTS"


@pytest.fixture(scope="session")
def can_have_hosts() -> None:
    """Skips what needs them, with the reason."""
    if os.environ.get(SWITCH) != "1":
        pytest.skip(f"takes 95 s and is not in CI yet; {SWITCH}=1 runs it")
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def two_hosts(can_have_hosts: None) -> Iterator[Cluster]:
    """node1 and node2."""
    with Cluster(2) as cluster:
        yield cluster
