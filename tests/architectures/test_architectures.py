"""A setting of each cause of wrong numbers, measured as `make test-architectures` measures all."""

import pytest
from survey import measured
from tiny_types import settings_of

# what is to come of it, and what the way of training or of rollouts is to say
SAMPLE = {
    ("llama", "default"): ("right", "fused layers"),
    ("bert", "default"): ("refused", "model must be causal"),  # reads in both directions unless it is a decoder
    ("bart", "default"): ("right", "prompts of one length together"),  # positions count the padding on the left
    ("modernbert-decoder", "default"): ("right", "packed"),  # names its head as its decoder
    ("doge", "default"): ("right", "a forward of the whole row for each token"),  # rows change with their padding
}


@pytest.mark.parametrize(("kind", "setting"), SAMPLE, ids=map(" ".join, SAMPLE))
def test_right_or_refused(kind, setting):
    result, way = SAMPLE[kind, setting]
    found = measured(kind, setting, dict(settings_of(kind))[setting])
    assert found["result"] == result, found
    assert way in found["training"] + found["rollouts"]
