"""Hosts of namespaces for the tests of this folder, which are skipped where they cannot be had."""

from collections.abc import Iterator

import pytest

from tests.cluster.fake_hosts import Cluster, why_not


@pytest.fixture(scope="session")
def can_have_hosts() -> None:
    """Skips what needs them, with the reason."""
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def two_hosts(can_have_hosts: None) -> Iterator[Cluster]:
    """node1 and node2."""
    with Cluster(2) as cluster:
        yield cluster
