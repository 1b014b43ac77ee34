"""--include and --exclude, in DeepSpeed's syntax."""

import pytest

from largetrain.errors import ConfigError
from largetrain.hosts.hostfile import Host
from largetrain.hosts.selection import select

HOSTS = [Host("a", 4), Host("b", 2), Host("fd00::1", 2)]


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        (None, None, HOSTS),
        ("a", None, [Host("a", 4)]),
        ("b@A", None, [Host("a", 4), Host("b", 2)]),
        ("a:2,0@b", None, [Host("a", 2, devices=(0, 2)), Host("b", 2)]),
        ("a:0,1,2,3", None, [Host("a", 4)]),
        ("[fd00::1]:1", None, [Host("fd00::1", 1, devices=(1,))]),
        (None, "a", HOSTS[1:]),
        (None, "a:1@b@[fd00::1]", [Host("a", 3, devices=(0, 2, 3))]),
        (None, "b:0,1", [HOSTS[0], HOSTS[2]]),
    ],
)
def test_what_is_left(include, exclude, left):
    assert select(HOSTS, include, exclude) == left


@pytest.mark.parametrize(
    ("include", "exclude", "told"),
    [
        ("a", "b", "give one of them"),
        ("c", None, "the hostfile has no 'c'; it lists a, b, fd00::1"),
        ("b:2", None, "b has slots=2, there is no device 2"),
        ("a:", None, "'a:' is not NAME or NAME:0,1"),
        ("a:x", None, "'a:x' is not NAME"),
        ("", None, "'' is not NAME"),
        ("a@a:1", None, "names a or one of its devices twice"),
        ("a:1,1", None, "names a or one of its devices twice"),
        (None, "a@b@[fd00::1]", "leaves no host"),
    ],
)
def test_mistakes(include, exclude, told):
    with pytest.raises(ConfigError) as raised:
        select(HOSTS, include, exclude)
    assert told in str(raised.value)
