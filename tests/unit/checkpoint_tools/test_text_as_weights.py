"""A file that is no weights at all."""

import pytest

from largetrain.checkpoint.weights import weights_from
from largetrain.errors import ConfigError


def test_a_text_is_refused_without_torchs_advice_to_read_it_unsafely(tmp_path):
    text = tmp_path / "README.md"
    text.write_text("# about\n\nnothing of torch\n")
    with pytest.raises(ConfigError, match=r"init_from: .*README.md is damaged, no file of torch.save") as caught:
        weights_from(str(text))
    assert "weights_only" not in str(caught.value)
