"""Optimiser states in the host's memory: the numbers of states on the GPU, without their memory between steps."""

import pytest
import torch

from strop import SFT
from tests.tiny_qwen2 import tiny_qwen2


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_states_are_on_the_host_between_steps_and_the_steps_are_the_same(name, tmp_path):
    found = []
    for offload in (False, True):
        sft = SFT(model=tiny_qwen2().cuda(), optimizer=name, learning_rate=1e-3, offload_optimizer=offload)
        for _ in range(3):
            sft.train_step([[2, 3]], [[4, 5, 6]])
        states = [value for state in sft.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        assert states
        if offload:
            assert not any(value.is_cuda for value in states)
            sft.save(tmp_path / "sft.pt")
            again = SFT.from_checkpoint(tmp_path / "sft.pt", device="cuda")
            again.train_step([[2, 3]], [[4, 5, 6]])
        found.append([param.detach().clone() for param in sft.module.parameters()])
    for plain, offloaded in zip(*found, strict=True):
        torch.testing.assert_close(offloaded, plain)
