"""A setting of each cause of wrong numbers, measured as `make test-architectures` measures all."""

import pytest
from survey import measured
from tiny_types import settings_of

# what is to come of it, and what the way of training or of rollouts is to say
SAMPLE = {
    ("llama", "default"): ("right", "fused layers"),
    ("llama", "dynamic"): ("right", "packed"),  # beyond a boundary every length has frequencies of its own
    ("llama", "longrope"): ("right", "own layers"),  # the frequencies of the longest row are those of all
    ("phi3", "longrope"): ("right", "own layers"),
    ("phi3", "window"): ("right", "packed"),
    ("phimoe", "window"): ("right", "packed"),  # a window that stands in the mask alone
    ("qwen2_moe", "window"): ("right", "packed"),
    ("gemma3_text", "default"): ("right", "packed"),  # windows in some layers
    ("llama4_text", "default"): ("right", "packed"),  # chunks
    ("gpt_oss", "longrope"): ("right", ""),  # attention sinks
    ("deepseek_v2", "longrope"): ("right", "packed"),  # latent attention, complex rotation
    ("glm_moe_dsa", "default"): ("right", "padded"),  # an indexer chooses the tokens
    ("bert", "default"): ("refused", "model must be causal"),  # reads in both directions unless it is a decoder
    ("bert", "decoder"): ("right", "packed"),
    ("xlnet", "default"): ("refused", "model must be causal"),
    ("roberta", "decoder"): ("right", "padded"),  # positions count from the padding's id
    ("bart", "default"): ("right", "prompts of one length together"),  # positions count the padding on the left
    ("bloom", "default"): ("right", "prompts of one length together"),  # no position_ids
    ("gpt2", "default"): ("right", "packed"),
    ("gpt_neo", "default"): ("right", "padded"),  # windows in code of its own
    ("modernbert-decoder", "default"): ("right", "packed"),  # names its head as its decoder
    ("granitemoehybrid", "default"): ("right", "padded"),  # loses use_cache
    ("falcon_h1", "default"): ("right", "padded"),  # attention and Mamba in one layer
    ("falcon_h1", "longrope"): ("right", "padded"),  # prompts with states are read in parts
    ("mamba2", "default"): ("right", ""),
    ("qwen3_next", "default"): ("right", "padded"),  # gated delta rule
    ("recurrent_gemma", "default"): ("right", ""),
    ("rwkv", "default"): ("right", "padded"),  # no gradient with a cache
    ("lfm2_moe", "default"): ("right", "padded"),  # convolutions
    ("doge", "default"): ("right", "a forward of the whole row for each token"),  # rows change with their padding
    ("big_bird", "decoder"): ("right", "padded"),
}


@pytest.mark.parametrize(("kind", "setting"), SAMPLE, ids=map(" ".join, SAMPLE))
def test_right_or_refused(kind, setting):
    result, way = SAMPLE[kind, setting]
    found = measured(kind, setting, dict(settings_of(kind))[setting])
    assert found["result"] == result, found
    assert way in found["training"] + found["rollouts"]
