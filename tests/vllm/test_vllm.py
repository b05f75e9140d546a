"""Against the real thing: a stock vLLM on the CPU, in a process of its own. Its start takes half a minute."""

import contextlib
import copy
import http.client
import os
import socket
import subprocess
import threading
import time

import peft
import pytest
import torch
from tiny_tokenizers import hugging_face

from strop.algorithms.grpo import GRPO
from strop.data.batch import TokenBatch
from strop.environments import Environment, Player, Turn
from strop.models import as_policy
from strop.rollout import Sampler, Sampling, generate, sampling_logps
from strop.rollout.client import Server, ServerConfig, ServerError
from strop.rollout.server_sampler import ServerSampler

PROMPTS = [[5, 6, 7], [8, 9], [10] * 20, [11], list(range(5, 45))]
GREEDY = Sampling(max_new_tokens=24, temperature=0.0)
WARM = Sampling(max_new_tokens=24, temperature=0.7, top_k=9, top_p=0.9)
PROCESSED = ("--logprobs-mode", "processed_logprobs")
START_WITHIN = 300  # seconds


def make_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=32, max_position_embeddings=128, initializer_range=0.2, bos_token_id=0,
                eos_token_id=1, pad_token_id=1,
            )
        ).eval()  # fmt: skip


class VLLM:
    """A `vllm serve` of a folder, at an address that stays when it is started again."""

    def __init__(self, folder, log):
        self.folder, self.log, self.process = folder, log, None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self, *options):
        given = {
            "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip
        command = [os.environ["STROP_VLLM"], "serve", str(self.folder), "--port", str(self.port), "--dtype", "float32",
                   "--enforce-eager", "--enable-lora", "--max-lora-rank", "16", "--max-model-len", "128", *options]  # fmt: skip
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **given}, start_new_session=True
            )
        until = time.monotonic() + START_WITHIN
        while not self.answers():
            assert self.process.poll() is None, f"vllm ended:\n{self.log.read_text()[-3000:]}"
            assert time.monotonic() < until, f"vllm does not answer:\n{self.log.read_text()[-3000:]}"
            time.sleep(0.5)

    def answers(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False

    def kill(self):
        """With its engine, which is a process below it."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)
            self.process.wait()


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    make_model().save_pretrained(folder / "model")
    hugging_face().save_pretrained(folder / "model")
    running = VLLM(folder / "model", folder / "log.txt")
    try:
        running.start(*PROCESSED)
        yield running
    finally:
        running.kill()


def served(model, vllm, **options):
    config = ServerConfig(rollout_server=vllm.url, **{"server_timeout": 120.0, **options})
    return ServerSampler(as_policy(model), config, model.save_pretrained)


def change(model, by=0.02):
    with torch.no_grad():
        for number, param in enumerate(p for p in model.parameters() if p.requires_grad):
            param.add_(by * torch.randn(param.shape, generator=torch.Generator().manual_seed(number)))


def ids_of(rollout):
    return [ids.tolist() for ids in rollout.completion_ids]


def check_greedy(rollout, model):
    local = generate(as_policy(model), PROMPTS, GREEDY)
    assert ids_of(rollout) == ids_of(local)
    torch.testing.assert_close(torch.cat(rollout.logps), torch.cat(local.logps), rtol=0, atol=1e-4)
    assert rollout.finish_reasons == local.finish_reasons


def test_greedy_is_our_engines(vllm):
    model = make_model()
    rollout = served(model, vllm)(PROMPTS, GREEDY, 1, 0)
    check_greedy(rollout, model)
    # an id that ends completions, EOS or not, is their last
    stop = Sampling(max_new_tokens=24, temperature=0.0, stop_ids=(rollout.completion_ids[0][3].item(),))
    found, local = served(model, vllm)(PROMPTS, stop, 1, 0), generate(as_policy(model), PROMPTS, stop)
    assert ids_of(found) == ids_of(local)
    assert found.finish_reasons == local.finish_reasons
    assert "eos" in found.finish_reasons


def test_log_probs_are_of_the_distribution_drawn_from(vllm):
    model = make_model()
    rollout = served(model, vllm)(PROMPTS, WARM, 6, 3)
    batch = TokenBatch.of(rollout)
    with torch.no_grad():
        logps_nV = sampling_logps(as_policy(model).logits(batch), WARM)
    wanted = logps_nV.gather(1, batch.targets_n[:, None])[:, 0]
    torch.testing.assert_close(torch.cat(rollout.logps), wanted, rtol=0, atol=1e-4)
    assert len({tuple(ids) for ids in ids_of(rollout)[:6]}) > 1


def test_draws_do_not_depend_on_how_requests_are_spread(vllm):
    model = make_model()
    first = served(model, vllm, server_requests=1)(PROMPTS, WARM, 4, 5)
    assert ids_of(served(model, vllm)(PROMPTS, WARM, 4, 5)) == ids_of(first)
    assert ids_of(served(model, vllm)(PROMPTS, WARM, 4, 6)) != ids_of(first)


def test_disk_sync(vllm):
    model = make_model()
    rollouts = served(model, vllm)
    for _ in range(3):
        check_greedy(rollouts(PROMPTS, GREEDY, 1, 0), model)
        assert rollouts.weights.apart < 1e-4
        change(model)


def test_lora_sync(vllm):
    base = make_model()
    served(base, vllm)(PROMPTS[:1], GREEDY, 1, 0)  # what the tests before left is not below the adapter
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(copy.deepcopy(base), config)
    rollouts = served(model, vllm, sync="lora")
    for _ in range(3):
        check_greedy(rollouts(PROMPTS, GREEDY, 1, 0), model)
        change(model, 0.3)
    answer = Server(vllm.url, ServerConfig())._call("GET", "/v1/models")
    names = [one["id"] for one in answer["data"] if one["parent"] is not None]
    assert names == [rollouts.weights.name]  # the old ones are gone


@pytest.mark.parametrize("sync", ["disk", "lora"])
def test_old_weights_are_noticed(vllm, sync, monkeypatch):
    model = make_model()
    served(model, vllm)(PROMPTS[:1], GREEDY, 1, 0)
    if sync == "lora":
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    rollouts = served(model, vllm, sync=sync)
    rollouts(PROMPTS, GREEDY, 1, 0)
    monkeypatch.setattr(Server, "_load", lambda self, weights: None)  # the server is not told
    change(model, 0.1 if sync == "lora" else 3e-4)
    with pytest.raises(ServerError, match=rf"{vllm.url} must serve the weights of .*, found the old ones"):
        rollouts(PROMPTS, GREEDY, 1, 0)


@pytest.mark.parametrize("sync", ["disk", "lora"])
def test_grpo(vllm, sync):
    def reward(completions):
        return [float((ids < 30).float().mean()) for ids in completions]

    model = make_model()
    served(model, vllm)(PROMPTS[:1], GREEDY, 1, 0)
    grpo = GRPO(
        model=model, reward_fn=reward, group_size=4, kl_coef=0.0, learning_rate=1e-2, max_new_tokens=16, importance_cap=2.0,
        rollout_server=vllm.url, sync=sync, lora={"r": 4} if sync == "lora" else None,
    )  # fmt: skip
    for _ in range(3):
        metrics = grpo.train_step(PROMPTS)
        assert metrics["mismatch_kl"] < 1e-8
        assert metrics["importance/mean"] == pytest.approx(1, abs=1e-4)
        assert metrics["grad_norm"] > 0


def test_one_step_ahead(vllm):
    def reward(completions):
        return [float((ids < 30).float().mean()) for ids in completions]

    grpo = GRPO(
        model=make_model(), reward_fn=reward, group_size=4, kl_coef=0.0, learning_rate=1e-3, max_new_tokens=16,
        importance_cap=2.0, batch_size=2, num_steps=4, rollout_server=vllm.url, max_staleness=1,
    )  # fmt: skip
    mismatch = [step["mismatch_kl"] for step in grpo.train([{"prompt": prompt} for prompt in PROMPTS]).steps]
    assert mismatch[0] < 1e-8
    assert min(mismatch[1:]) > 1e-6


class Partner(Environment):
    """Says the number of tokens it heard, three times; what it heard says how well it was."""

    def reset(self, row):
        self.turns = 0
        return row["prompt"]

    def step(self, reply):
        self.turns += 1
        return Turn([5, 6, 7 + len(reply) % 20], reward=float(sum(reply) % 5), done=self.turns == 3)


def test_a_conversation_is_our_engines(vllm):
    """Every turn is a request with all ids before it; what was drawn is never written anew."""
    grpo = GRPO(
        model=make_model(), environment=Partner, group_size=2, kl_coef=0.0, max_new_tokens=8, learning_rate=1e-3,
        rollout_server=vllm.url,
    )  # fmt: skip
    rows, greedy = [{"prompt": prompt} for prompt in PROMPTS], Sampling(max_new_tokens=8, temperature=0.0)
    found = grpo.player(rows, greedy, 1, 0)
    wanted = Player(Partner, Sampler(grpo.policy), grpo.policy, grpo.config.turns)(rows, greedy, 1, 0)
    assert ids_of(found) == ids_of(wanted)
    assert max(len(line.turns) for line in found) == 3
    torch.testing.assert_close(torch.cat(found.logps), torch.cat(wanted.logps), rtol=0, atol=1e-4)
    metrics = grpo.train_step(rows)
    assert metrics["mismatch_kl"] < 1e-8
    assert metrics["grad_norm"] > 0


# ---- the last ones end the server ----


def test_a_server_that_dies_and_one_that_comes_back_with_old_weights(vllm):
    model = make_model()
    change(model)
    client = served(model, vllm, server_timeout=3.0)
    check_greedy(client(PROMPTS, GREEDY, 1, 0), model)
    long = Sampling(max_new_tokens=80)
    threading.Timer(0.3, vllm.kill).start()
    with pytest.warns(UserWarning, match=f"{vllm.url} does not answer"), pytest.raises(
        ServerError, match=rf"{vllm.url} does not answer .*; given up after 3 s"
    ):  # fmt: skip
        client(PROMPTS * 40, long, 8, 0)
    client.servers[0].config = ServerConfig(server_timeout=120.0)
    vllm.start(*PROCESSED)
    check_greedy(client(PROMPTS, GREEDY, 1, 0), model)


def test_raw_log_probs_are_noticed(vllm):
    vllm.kill()
    vllm.start()  # with vLLM's default
    with pytest.raises(
        ServerError, match=f"{vllm.url} must give log-probs of the distribution it draws from, .*processed"
    ):
        served(make_model(), vllm)(PROMPTS, WARM, 1, 0)


def test_a_folder_it_does_not_see(vllm):
    client = served(make_model(), vllm)
    client._save = lambda folder: folder.mkdir()
    with pytest.raises(ServerError, match=f"{vllm.url} answers /collective_rpc with 500"):
        client(PROMPTS, GREEDY, 1, 0)
