"""Shards in one process: the copy for rollouts, and what is said where it does not fit. What processes compare."""

import os

import pytest
import torch
import torch.distributed as dist
from tiny_models import PlainModel, moe, qwen2

from strop.data.batch import Trajectory
from strop.data.digest import digest_rows
from strop.distributed import World, whole
from strop.models import as_policy
from strop.rollout import Sampling, generate


class Several(World):
    """Process 0 of as many as there are values, which the others have said."""

    def __new__(cls, *others):
        return super().__new__(cls)

    def __init__(self, *others):
        super().__init__(size=1 + len(others))
        object.__setattr__(self, "others", others)

    def gathered(self, value):
        return [value, *self.others]


def test_what_differs_between_processes_is_named():
    Several({"a": 1, "b": [2]}, {"a": 1, "b": [2]}).check_same({"a": 1, "b": [2]})
    says = r"b must be the same in every process, .*, found \[2\] in process 0 and \[3\] in process 2"
    with pytest.raises(ValueError, match=says):
        Several({"a": 1, "b": [2]}, {"a": 1, "b": [3]}).check_same({"a": 1, "b": [2]})
    with pytest.raises(ValueError, match="found 1 in process 0 and None in process 1"):
        Several({}).check_same({"a": 1})


def test_digests_of_rows_depend_on_their_content_alone():
    """Not by what differs from process to process: addresses, the order of sets."""
    rows = [Trajectory.of_prompt([i, 6], row={"answer": {1, i}, "tool": object()}) for i in range(100)]
    again = [Trajectory.of_prompt([i, 6], row={"answer": {i, 1}, "tool": object()}) for i in range(100)]
    assert digest_rows(rows) == digest_rows(again)
    assert digest_rows(rows) != digest_rows(rows[::-1])
    assert digest_rows(rows) != digest_rows(rows[1:])
    assert digest_rows(rows) != digest_rows(rows[::2])


@pytest.fixture
def alone_in_a_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("tied", [False, True])
def test_the_gathered_copy_equals_the_model_and_is_freed(alone_in_a_group, tied):
    """With the weights of the moment, in the same memory while it lasts, and without memory afterwards."""
    model = qwen2(tie_word_embeddings=tied)
    wanted = generate(as_policy(model), [[5, 6]], Sampling(max_new_tokens=6), num_samples=3, seed=1).completion_ids
    policy = as_policy(model)
    policy.shard(None)
    for _ in range(2):
        with policy.whole() as copy:
            found = generate(copy, [[5, 6]], Sampling(max_new_tokens=6), num_samples=3, seed=1).completion_ids
            assert [ids.tolist() for ids in found] == [ids.tolist() for ids in wanted]
            head, embedding = copy.model.lm_head.weight, copy.model.model.embed_tokens.weight
            assert (head is embedding) == tied
        assert all(param.is_meta for param in copy.model.parameters())
    with torch.no_grad():
        for param in policy.model.parameters():
            param.mul_(0.5)
    with policy.whole() as copy:
        for ours, theirs in zip(copy.model.parameters(), policy.model.parameters(), strict=True):
            assert ours.equal(whole(theirs))


def test_a_copy_that_does_not_fit_names_the_server(alone_in_a_group, monkeypatch):
    policy = as_policy(qwen2())
    policy.shard(torch.bfloat16)

    def full():
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(policy.shards, "gather", full)
    with (
        pytest.raises(
            ValueError,
            match=r"a whole copy of the weights, 0\.0 GB, beside the shards, found too little; rollout_server",
        ),
        policy.whole(),
    ):
        pass


def test_models_that_cannot_be_sharded_are_refused(alone_in_a_group):
    with pytest.raises(ValueError, match="shard must be 'none' for strop's MoE"):
        as_policy(moe()).shard(None)
    with pytest.raises(ValueError, match="compile must be False with shard='full'"):
        as_policy(torch.compile(PlainModel(), backend="eager")).shard(None)


def test_sharding_needs_torchrun():
    from strop import SFT

    assert "TORCHELASTIC_RUN_ID" not in os.environ
    with pytest.raises(ValueError, match="shard must be 'none' without torchrun"):
        SFT(model=PlainModel(), shard="full")


def test_a_kept_copy_is_refilled_in_place(alone_in_a_group):
    """As on a GPU, where graphs hold its addresses."""
    policy = as_policy(qwen2())
    policy.shard(None)
    policy.shards.gather()
    addresses = [param.data_ptr() for param in policy.shards.twin.parameters()]
    with torch.no_grad():
        for param in policy.model.parameters():
            param.add_(0.25)
    policy.shards.gather()
    assert addresses == [param.data_ptr() for param in policy.shards.twin.parameters()]
    for ours, theirs in zip(policy.shards.twin.parameters(), policy.model.parameters(), strict=True):
        assert ours.equal(whole(theirs))
