"""What goes wrong when ranks are to meet."""

import socket

import pytest
import torch.distributed as dist

from largetrain.engine.environment import _taken_port_named
from largetrain.errors import ConfigError


def test_a_taken_port_is_named_with_the_way_out(monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with (
            pytest.raises(ConfigError, match=f"MASTER_PORT {port}: another program .* --master_port"),
            _taken_port_named(),
        ):
            dist.TCPStore("127.0.0.1", port, 2, is_master=True)


def test_other_failures_stay_as_they_are():
    with pytest.raises(RuntimeError, match="no such backend"), _taken_port_named():
        raise RuntimeError("no such backend")
