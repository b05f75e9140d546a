"""Rollouts by servers, here `strop serve`: what comes back, how weights get there, and what a server may not say."""

import asyncio
import contextlib
import copy
import itertools
import json
import signal
import socket
import threading
import time
import warnings

import peft
import pytest
import torch
from starlette.responses import Response
from tiny_models import llama

from strop.algorithms.distill import Distill
from strop.algorithms.grpo import GRPO
from strop.algorithms.online_dpo import OnlineDPO
from strop.environments import Environment, Player, Turn
from strop.models import as_policy
from strop.rollout import Rollout, Sampling, generate
from strop.rollout.client import Server, ServerConfig, ServerError, ServerPool, Weights
from strop.rollout.openai_server import OpenAIServer
from strop.rollout.served_model import ServedModel
from strop.rollout.server_sampler import Sampler, ServerSampler
from strop.training.run import Interruption

PROMPTS = [[5, 6, 7], [8, 9], [10] * 9, [11], [12, 13]]
EOS = 14  # which greedy completions of some of the prompts reach
GREEDY, WARM = Sampling(max_new_tokens=10, temperature=0.0), Sampling(max_new_tokens=10, temperature=0.9, top_k=12)


def make_model(seed=0):
    return llama(eos_token_id=EOS, seed=seed, vocab_size=40, scale=4.0)


class Running:
    """A server on localhost whose answers a test can spoil: `spoil(path, body)` returns (status, text), or None for none."""

    def __init__(self, model, port=0, allow_sync=True):
        self.served = ServedModel(as_policy(model), "tiny", max_batch=1)  # bits do not depend on who asks beside
        self.spoil, self.paths, self.bodies, self.at_once, self.most = None, [], [], 0, 0
        self.server = OpenAIServer(self.served, port=port, allow_sync=allow_sync)
        self._app, self.server.app = self.server.app, self._spoiled
        self.server.start()

    async def _spoiled(self, scope, receive, send):
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        message = await receive()
        while message.get("more_body"):
            more = await receive()
            message = {**more, "body": message["body"] + more["body"]}
        body = json.loads(message["body"])
        self.paths.append(scope["path"])
        self.bodies.append(body)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        found = await asyncio.to_thread(self.spoil, scope["path"], body) if self.spoil else None
        self.at_once -= 1
        if found == "dies":
            receive.__self__.transport.abort()
            return
        if found:
            await Response(found[1], found[0])(scope, receive, send)
            return
        messages = iter([message])

        async def again():
            return next(messages, None) or await receive()

        await self._app(scope, again, send)

    @property
    def url(self):
        return self.server.url

    def stop(self):
        self.server.stop()
        self.served.close()


@pytest.fixture
def start():
    """start(model) → a running server of a copy of it."""
    with contextlib.ExitStack() as stack:

        def make(model, **options):
            running = Running(copy.deepcopy(model), **options)
            stack.callback(running.stop)
            return running

        yield make


def served(model, *running, timeout=20.0, **options):
    config = ServerConfig(rollout_server=tuple(one.url for one in running), server_timeout=timeout, **options)
    return ServerSampler(as_policy(model), config, model.save_pretrained)


def change(model, by=0.02):
    with torch.no_grad():
        for number, param in enumerate(p for p in model.parameters() if p.requires_grad):
            param.add_(by * torch.randn(param.shape, generator=torch.Generator().manual_seed(number)))


def alone(model, prompts, sampling):
    """By this process's engine, a prompt at a time, as the servers do: a product over more rows may sum in another order."""
    return Rollout([line for prompt in prompts for line in generate(as_policy(model), [prompt], sampling)])


def check_same(rollout, other):
    assert [c.tolist() for c in rollout.completion_ids] == [c.tolist() for c in other.completion_ids]
    for logps, wanted in zip(rollout.logps, other.logps, strict=True):
        torch.testing.assert_close(logps, wanted, rtol=0, atol=5e-6)  # the server decodes samples apart
    assert rollout.finish_reasons == other.finish_reasons


# ---- what comes back ----


def test_greedy_is_the_engines(start):
    model = make_model()
    running = start(model)
    rollout = served(model, running)(PROMPTS, GREEDY, 2, 0)
    local = alone(model, PROMPTS, GREEDY)
    check_same(Rollout(rollout[::2]), local)
    check_same(Rollout(rollout[1::2]), local)
    assert set(local.finish_reasons) == {"eos", "length"}
    assert [p.tolist() for p in rollout.prompt_ids] == [p for p in PROMPTS for _ in range(2)]
    assert rollout.engine == f"server {running.url}"
    assert rollout.logps[0].dtype == torch.float32
    # the ids of stop_ids end a completion too, and are no others than those sent
    stop = Sampling(max_new_tokens=10, temperature=0.0, stop_ids=(local.completion_ids[0][1].item(),))
    check_same(served(model, running)(PROMPTS, stop, 1, 0), alone(model, PROMPTS, stop))


def test_draws_do_not_depend_on_how_requests_are_spread(start):
    model = make_model()
    servers = [start(model) for _ in range(3)]
    one = served(model, servers[0], server_requests=1)(PROMPTS, WARM, 4, 7)
    check_same(served(model, *servers, server_requests=2)(PROMPTS, WARM, 4, 7), one)
    check_same(served(model, servers[1])(PROMPTS[:2], WARM, 4, 7), Rollout(one[:8]))
    other = served(model, servers[0])(PROMPTS, WARM, 4, 8)
    assert [c.tolist() for c in other.completion_ids] != [c.tolist() for c in one.completion_ids]
    assert len({tuple(c.tolist()) for c in one.completion_ids[:4]}) > 1
    twice = [c.tolist() for c in served(model, servers[0])(PROMPTS[:1] * 2, WARM, 4, 7).completion_ids]
    assert twice[:4] != twice[4:]  # a prompt that is there twice has two seeds
    # and are drawn by the engine from each prompt's own seed
    seed = next(b["seed"] for b in servers[0].bodies if b.get("prompt") == PROMPTS[0] and b["n"] == 4)
    local = generate(as_policy(model), PROMPTS[:1], WARM, num_samples=4, seed=seed)
    check_same(Rollout(one[:4]), local)


def test_no_more_requests_than_allowed(start):
    model = make_model()
    running = start(model)
    together = threading.Barrier(
        3, timeout=60
    )  # which three pass at a time: so many there are, however slow the machine

    def wait(path, body):
        if path == "/v1/completions" and "prompt_logprobs" not in body:
            together.wait()

    running.spoil = wait
    served(model, running, server_requests=3)(PROMPTS * 3, GREEDY, 1, 0)
    assert running.most == 3


def test_what_generation_configs_would_change_is_said(start):
    running = start(make_model())
    served(make_model(), running)(PROMPTS[:1], WARM, 2, 0)
    body = running.bodies[-1]
    wanted = {"temperature": 0.9, "top_k": 12, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "n": 2,
              "logprobs": 0, "return_token_ids": True, "ignore_eos": True, "stop_token_ids": [EOS], "max_tokens": 10}  # fmt: skip
    assert {name: body[name] for name in wanted} == wanted


# ---- weights ----


@pytest.mark.parametrize("seed", [0, 5])
def test_disk_sync(start, tmp_path, seed):
    """Whatever weights the server began with."""
    model = make_model()
    running = start(make_model(seed))
    rollouts = served(model, running, sync_folder=str(tmp_path / "weights"))
    folders = []
    for number in range(3):
        for _ in range(2):
            check_same(rollouts(PROMPTS, GREEDY, 1, 0), alone(model, PROMPTS, GREEDY))
        folders += [path.name for path in (tmp_path / "weights").iterdir()]  # one is left of each version
        assert len(folders) == number + 1
        change(model)
    assert len(set(folders)) == 3
    # once for every version, not for every rollout
    assert running.paths.count("/collective_rpc") == running.paths.count("/reset_prefix_cache") == 3


def test_lora_sync(start):
    base = make_model()
    running = start(base)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(copy.deepcopy(base), config)
    rollouts = served(model, running, sync="lora")
    before = rollouts(PROMPTS, GREEDY, 1, 0)
    check_same(before, alone(base, PROMPTS, GREEDY))
    for _ in range(2):
        change(model, 0.3)
        check_same(rollouts(PROMPTS, GREEDY, 1, 0), alone(model, PROMPTS, GREEDY))
    assert [c.tolist() for c in before.completion_ids] != [
        c.tolist() for c in rollouts(PROMPTS, GREEDY, 1, 0).completion_ids
    ]
    names = [body["lora_name"] for body in running.bodies if "lora_path" in body]
    assert len(set(names)) == 3
    assert running.served.adapters == names[-1:]  # the old ones are gone
    # the model below is as it was
    asked = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 10, "temperature": 0, "stop_token_ids": [EOS], "n": 1}
    found = Server(running.url, ServerConfig()).completions(asked, as_policy(base))
    assert found[0][0].tolist() == before.completion_ids[0].tolist()


@pytest.mark.parametrize("sync", ["disk", "lora"])
def test_old_weights_are_noticed(start, sync, monkeypatch):
    """A server that says it has loaded them and has not."""
    model = make_model()
    running = start(model)
    if sync == "lora":
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    rollouts = served(model, running, sync=sync)
    rollouts(PROMPTS, GREEDY, 1, 0)
    if sync == "disk":
        monkeypatch.setattr(running.served, "reload_weights", lambda path: None)
    else:
        monkeypatch.setattr(running.served.queue, "_use_model", lambda name: _base_alone(running.served))
    rollouts._published = -1  # written once more, as after an update that changed nothing: no error
    rollouts(PROMPTS, GREEDY, 1, 0)
    change(model, 0.1 if sync == "lora" else 1e-3)
    with pytest.raises(ServerError, match=rf"{running.url} must serve the weights of strop-.*-3, found the old ones"):
        rollouts(PROMPTS, GREEDY, 1, 0)
    asked = len(running.paths)
    with pytest.raises(ServerError, match="found the old ones"):  # those weights are offered to no server any more
        rollouts(PROMPTS, GREEDY, 1, 0)
    assert len(running.paths) == asked


@contextlib.contextmanager
def _base_alone(served):
    from strop.models.kinds import adapter_off

    with adapter_off(served.policy.model):
        yield served.policy


def test_another_model_is_noticed(start, monkeypatch):
    running = start(make_model(seed=3))
    monkeypatch.setattr(running.served, "reload_weights", lambda path: None)
    with pytest.raises(ServerError, match=r"found others: its log-probs of a probe are .* is it started with the same"):
        served(make_model(), running)(PROMPTS, GREEDY, 1, 0)


def test_which_log_probs_are_whose():
    """By hand: 64 tokens, weights that moved the log-probs by 0.1, a server with an error of 0.01 to 1."""
    new, old = torch.zeros(64, dtype=torch.float64), torch.full((64,), 0.1, dtype=torch.float64)
    noise = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(32)

    def check(found, tolerance=0.5, old=old):
        weights = Weights("w", None, [], new, old)
        weights.check(found, "url", tolerance)
        return weights

    assert check(new + 0.01 * noise).baseline is new  # told apart: 0.1·√64 > 8·0.01
    with pytest.raises(ServerError, match=r"0.01 from theirs and 0.1 from the new ones'"):
        check(old + 0.01 * noise)
    assert check(new + 0.2 * noise).baseline is old  # an error of 0.2 hides it: the next version is held against `old`
    check(old + 0.2 * noise)
    with pytest.raises(ServerError, match=r"are 0.6 from the trainer's .* sync_tolerance=0.5"):
        check(new + 0.6 * noise)
    with pytest.raises(ServerError, match="are nan from"):
        check(new * float("nan"))
    assert check(new, old=None).baseline is new


def test_raw_log_probs_are_noticed(start):
    """vLLM's default gives log-probs before temperature, top_k and top_p."""
    running = start(make_model())

    def raw(path, body):
        if path != "/v1/completions":
            return None
        probe = [None, *({str(token): {"logprob": -1.0}} for token in body["prompt"][1:])]
        choice = {"index": 0, "token_ids": [3], "logprobs": {"token_logprobs": [-0.7]}, "prompt_logprobs": probe}
        return 200, json.dumps({"choices": [choice]})

    running.spoil = raw
    with pytest.raises(ServerError, match="start it with --logprobs-mode processed_logprobs"):
        served(make_model(), running)(PROMPTS, WARM, 1, 0)


def test_a_server_without_the_endpoints_says_what_it_needs(start):
    running = start(make_model(), allow_sync=False)
    with pytest.raises(
        ServerError, match=r"/collective_rpc with 404.*start it with VLLM_SERVER_DEV_MODE=1 \(strop serve: --allow-sync"
    ):
        served(make_model(), running)(PROMPTS, GREEDY, 1, 0)


def test_a_folder_the_server_does_not_see(start):
    running = start(make_model())
    client = served(make_model(), running)
    client._save = lambda folder: folder.mkdir()
    with pytest.raises(ServerError, match=r"/collective_rpc with 500: .*without config.json"):
        client(PROMPTS, GREEDY, 1, 0)


# ---- failures ----


def failing(times, how):
    left = [times]

    def spoil(path, body):
        if path == "/v1/completions" and "prompt_logprobs" not in body and left[0]:
            left[0] -= 1
            return how
        return None

    return spoil


@pytest.mark.parametrize("how", ["dies", (503, "busy"), (500, "<html>oops</html>")])
def test_requests_that_fail_are_asked_again(start, how):
    model = make_model()
    running = start(model)
    running.spoil = failing(3, how)
    with pytest.warns(UserWarning, match=rf"{running.url} .*; it is asked again"):
        rollout = served(model, running)(PROMPTS, GREEDY, 1, 0)
    check_same(rollout, alone(model, PROMPTS, GREEDY))
    # after anything but "not now" the server may be another, and the weights are brought anew
    assert (running.paths.count("/collective_rpc") > 1) == (how != (503, "busy"))


def test_an_adapter_that_is_still_there_is_taken(start):
    model = make_model()
    running = start(model)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    running.spoil = failing(3, "dies")
    with pytest.warns(UserWarning, match="it is asked again"):
        rollout = served(model, running, sync="lora")(PROMPTS, GREEDY, 1, 0)
    check_same(rollout, alone(model, PROMPTS, GREEDY))
    assert running.paths.count("/v1/load_lora_adapter") > 1
    assert "/v1/unload_lora_adapter" not in running.paths


def test_a_server_that_dies_leaves_its_work_to_the_others(start):
    model = make_model()
    dying, other = start(model), start(model)
    done = []

    def die(path, body):
        done.append(path)
        return "dies" if len(done) > 4 else None

    dying.spoil = die
    with pytest.warns(UserWarning, match=rf"{dying.url} does not answer"):
        rollout = served(model, dying, other, server_requests=2)(PROMPTS * 4, WARM, 2, 3)
    check_same(rollout, served(model, other)(PROMPTS * 4, WARM, 2, 3))


def test_a_server_that_is_gone_is_an_error_that_names_it_and_why(start):
    model = make_model()
    running = start(model)
    client = served(model, running)
    client(PROMPTS, GREEDY, 1, 0)
    running.stop()
    client.pool.servers[0].config = ServerConfig(server_timeout=0.5)
    began = time.monotonic()
    with pytest.warns(UserWarning, match="ConnectionRefusedError"), pytest.raises(
        ServerError, match=rf"{running.url} does not answer .*ConnectionRefusedError.*; given up after 0.5 s"
    ):  # fmt: skip
        client(PROMPTS, GREEDY, 1, 0)
    assert time.monotonic() - began < 30


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_a_server_that_was_never_started_is_given_up_soon():
    """Not after server_timeout, which is for a server that has answered before."""
    model, url = make_model(), f"http://127.0.0.1:{free_port()}"
    config = ServerConfig(rollout_server=url, server_start_timeout=0.5)
    began = time.monotonic()
    with pytest.warns(UserWarning, match="ConnectionRefusedError"), pytest.raises(
        ServerError, match=r"given up after 0.5 s; is the server started\? One that is loading needs server_start_timeout"
    ):  # fmt: skip
        ServerSampler(as_policy(model), config, model.save_pretrained)(PROMPTS, GREEDY, 1, 0)
    assert time.monotonic() - began < 30
    assert ServerConfig().server_start_timeout == 5.0


def test_a_signal_is_heard_while_every_server_fails():
    """Else a run would finish its step first, and no step ends."""
    model, found = make_model(), []
    config = ServerConfig(rollout_server=f"http://127.0.0.1:{free_port()}", server_start_timeout=4.0)
    rollouts = ServerSampler(as_policy(model), config, model.save_pretrained)
    before = signal.signal(signal.SIGTERM, lambda number, frame: found.append(time.monotonic()))

    def tell():
        while not rollouts.pool.is_stuck:
            time.sleep(0.05)
        signal.raise_signal(signal.SIGTERM)

    timer = threading.Thread(target=tell)
    try:
        timer.start()
        with Interruption() as interruption, pytest.warns(UserWarning, match="asked again"):  # noqa: SIM117
            with pytest.raises(ServerError, match="given up"):
                rollouts(PROMPTS, GREEDY, 1, 0)
        assert interruption.signal == signal.SIGTERM
        assert len(found) == 1  # by the handler that was there before, at once
    finally:
        timer.join()
        signal.signal(signal.SIGTERM, before)


def test_the_key_is_sent(start, monkeypatch):
    served = ServedModel(as_policy(make_model()), "tiny")
    server = OpenAIServer(served, api_key="secret").start()
    try:
        one = Server(server.url, ServerConfig())
        with pytest.raises(ServerError, match="with 401: Authorization must be Bearer"):
            one.prompt_logps([5, 6, 7])
        monkeypatch.setenv("STROP_API_KEY", "secret")
        assert len(one.prompt_logps([5, 6, 7])) == 2
    finally:
        server.stop()
        served.close()


def test_a_silent_server_is_given_up(start):
    model = make_model()
    running = start(model)
    running.spoil = lambda path, body: time.sleep(1.5) if "prompt_logprobs" not in body else None
    with (
        pytest.warns(UserWarning, match="no answer in"),
        pytest.raises(ServerError, match=r"no answer in 0.4 s; given up"),
    ):
        served(model, running, timeout=0.4)(PROMPTS, GREEDY, 1, 0)


def test_a_server_started_anew_gets_the_weights_again(start):
    """It has the old ones, and its address is the same: nothing but the failure in between tells."""
    old = make_model()
    model = copy.deepcopy(old)
    running = start(old)
    client = served(model, running, server_requests=1)
    client(PROMPTS, GREEDY, 1, 0)
    change(model)
    again = []

    def restart(path, body):
        if "prompt_logprobs" in body or path != "/v1/completions" or len(running.paths) < 10 or again:
            return None
        again.append(running.served.reload_weights)
        running.served.policy.model.load_state_dict(old.state_dict())
        return "dies"

    running.spoil = restart
    with pytest.warns(UserWarning, match="asked again"):
        rollout = client(PROMPTS, GREEDY, 1, 0)
    assert again
    check_same(rollout, alone(model, PROMPTS, GREEDY))


def choice(**changes):
    one = {"index": 0, "token_ids": [3, EOS], "prompt_token_ids": [5, 6, 7], "finish_reason": "stop",
           "logprobs": {"token_logprobs": [-0.5, -0.25]}, **changes}  # fmt: skip
    return json.dumps({"choices": [one]})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<html>a proxy</html>", r"must give 1 choices, found <html>a proxy</html>"),
        ("", r"must give 1 choices, found \{\}"),
        ('{"choices": []}', r"must give 1 choices"),
        ('{"choices": [3]}', r"must give 1 choices"),
        (choice(index=1), r"must give 1 choices"),
        (choice(token_ids=None), r"must give token_ids of every choice \(return_token_ids\), found null"),
        (choice(token_ids=[]), r"must give token_ids of every choice"),
        (choice(token_ids=["3", "1"]), r"must give token_ids of every choice"),
        (choice(token_ids=[99, EOS]), r"token_ids of http.* must hold ids from 0 to 39, found 99"),
        (choice(prompt_token_ids=[5, 6]), r"must give the prompt's ids back as they were sent, found \[5, 6\]"),
        (choice(logprobs=None), r"must give token_logprobs of the 2 tokens, found null"),
        (choice(logprobs={"token_logprobs": [-1.0]}), r"must give token_logprobs of the 2 tokens, found \[-1.0\]"),
        (choice(logprobs={"token_logprobs": [-1.0, float("nan")]}), r"that are finite numbers, found \[-1.0, NaN\]"),
        (choice(logprobs={"token_logprobs": [-1.0, None]}), r"that are finite numbers, found \[-1.0, null\]"),
        (choice(token_ids=[EOS, 3]), r"must give tokens up to one of \[14\] or 10 of them"),
        (choice(token_ids=[3, 4]), r"must give tokens up to one of \[14\] or 10 of them"),
    ],
)  # fmt: skip
def test_wrong_answers_are_errors_at_once(start, text, told):
    model = make_model()
    running = start(model)
    running.spoil = lambda path, body: (
        (200, text) if path == "/v1/completions" and "prompt_logprobs" not in body else None
    )
    with pytest.raises((ServerError, ValueError), match=told) as raised:
        served(model, running)(PROMPTS[:1], WARM, 1, 0)
    assert running.url in str(raised.value)


def test_a_good_answer_is_taken(start):
    """The spoiled ones above are this one with a change."""
    model = make_model()
    running = start(model)
    running.spoil = lambda path, body: (200, choice()) if "stop_token_ids" in body else None
    rollout = served(model, running)(PROMPTS[:1], WARM, 1, 0)
    assert rollout.completion_ids[0].tolist() == [3, EOS]
    assert rollout.logps[0].tolist() == [-0.5, -0.25]


# ---- options ----


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rollout_server": "127.0.0.1:8000"}, "rollout_server must be like http://127.0.0.1:8000, found '127.0.0.1:8000'"),
        ({"rollout_server": ("http://a", "ftp://b")}, "found 'ftp://b'"),
        ({"rollout_server": "http://a", "sync": "disc"}, "sync must be one of 'disk', 'lora', found 'disc'; did you mean 'disk'"),
        ({"server_timeout": 0.0}, "server_timeout must be"),
        ({"server_requests": 0}, "server_requests must be at least 1"),
        ({"sync_tolerance": 0.0}, "sync_tolerance must be"),
    ],
)  # fmt: skip
def test_options_check_themselves(options, told):
    with pytest.raises(ValueError, match=told):
        ServerConfig(**options)


def test_adapters_need_an_adapter():
    with pytest.raises(ValueError, match='sync must be "disk" for a model without a peft adapter, found "lora"'):
        GRPO(model=make_model(), reward_fn=len, rollout_server="http://a:1", sync="lora")


def test_options_from_the_command_line_and_yaml(tmp_path):
    from strop.algorithms.grpo import GRPOConfig
    from strop.cli.train import gather, options_for

    (tmp_path / "run.yaml").write_text("rollout_server: [http://a:1, http://b:2]\nsync: lora\nmax_staleness: 1\n")
    _, config = gather(GRPOConfig, tmp_path / "run.yaml")
    assert config.server == ServerConfig(rollout_server=("http://a:1", "http://b:2"), sync="lora", max_staleness=1)
    _, config = gather(GRPOConfig, tmp_path / "run.yaml", (), {"rollout_server": "http://c:3", "sync": "disk"})
    assert config.server.urls == ("http://c:3",)
    assert config.server.sync == "disk"
    assert {"--rollout-server", "--sync", "--max-staleness"} <= {option.flag for option in options_for(GRPOConfig)}


# ---- training ----


def reward(completions):
    return [float((ids < 20).float().mean()) for ids in completions]


@pytest.mark.parametrize("lora", [False, True])
def test_grpo_trains_on_what_a_server_samples(start, lora):
    model = make_model()
    running = start(model)
    options = {"lora": {"r": 4}, "sync": "lora"} if lora else {}
    grpo = GRPO(
        model=model, reward_fn=reward, group_size=4, kl_coef=0.0, learning_rate=1e-2, max_new_tokens=8, importance_cap=2.0,
        rollout_server=running.url, **options,
    )  # fmt: skip
    for _ in range(3):
        metrics = grpo.train_step(PROMPTS)
        assert metrics["mismatch_kl"] < 1e-9
        assert metrics["importance/mean"] == pytest.approx(1, abs=1e-5)
    found = grpo.evaluate([{"prompt": prompt} for prompt in PROMPTS])
    grpo.sampler = Sampler(grpo.policy)
    assert found == pytest.approx(grpo.evaluate([{"prompt": prompt} for prompt in PROMPTS]))


def test_online_dpo_trains_on_what_a_server_samples(start):
    model = make_model()
    running = start(model)
    online = OnlineDPO(model=model, reward_fn=reward, learning_rate=1e-2, max_new_tokens=8, rollout_server=running.url)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        metrics = online.train_step(PROMPTS)
    assert metrics["grad_norm"] > 0
    assert not before["lm_head.weight"].equal(model.state_dict()["lm_head.weight"])
    assert running.paths.count("/collective_rpc") == 2


class Partner(Environment):
    def reset(self, row):
        self.count = 0
        return row["prompt"]

    def step(self, reply):
        self.count += 1
        return Turn([5, 6], reward=float(len(reply)), done=self.count == 2)


def test_an_environments_turns_are_requests_of_their_own(start):
    """The weights are brought once a step, however many turns; greedy, the conversation is the engine's."""
    model = make_model()
    running = start(model)
    options = {"environment": Partner, "group_size": 2, "kl_coef": 0.0, "max_new_tokens": 8}
    grpo = GRPO(model=model, rollout_server=running.url, **options)
    metrics = grpo.train_step(PROMPTS)
    assert metrics["mismatch_kl"] < 1e-9
    assert running.paths.count("/collective_rpc") == 1
    rows, greedy = [{"prompt": prompt} for prompt in PROMPTS], Sampling(max_new_tokens=8, temperature=0.0)
    with grpo.sampler.ready():
        by_server = grpo.player(rows, greedy, 1, 0)
    here = Player(Partner, Sampler(grpo.policy), grpo.policy, grpo.config.turns)(rows, greedy, 1, 0)
    assert [ids.tolist() for ids in by_server.completion_ids] == [ids.tolist() for ids in here.completion_ids]
    for logps, wanted in zip(by_server.logps, here.logps, strict=True):  # in batches of other sizes
        torch.testing.assert_close(logps, wanted, rtol=0, atol=1e-5)
    assert max(len(line.turns) for line in here) == 2


# ---- ahead of training ----

ROWS = [{"prompt": [4 + i, 3]} for i in range(5)]


def ahead(start, algorithm=GRPO, max_staleness=1, servers=1, **options):
    """A trainer of six steps of two prompts, and its servers."""
    model = make_model()
    running = [start(model) for _ in range(servers)]
    known = {
        "learning_rate": 1e-2,
        "max_new_tokens": 6,
        "batch_size": 2,
        "num_steps": 6,
        "save_every": 2,
        "keep_checkpoints": 0,
    }
    known |= {"group_size": 4, "kl_coef": 0.0, "importance_cap": 2.0} if algorithm is GRPO else {}
    if "environment" not in options:
        known["reward_fn"] = reward
    urls = [one.url for one in running]
    made = algorithm(model=model, rollout_server=urls, max_staleness=max_staleness, **known | options)
    return made, running


def seen_by(grpo):
    """Return lists that fill with the weights before each step and the trajectories of each step."""
    weights, rollouts, step, score = [], [], grpo.step, grpo.score
    grpo.step = lambda prompts: (weights.append(copy.deepcopy(grpo.module.state_dict())), step(prompts))[1]
    grpo.score = lambda lines: (rollouts.append(lines), score(lines))[1]
    return weights, rollouts


def check_logps(lines, policy):
    from strop.data.batch import TokenBatch

    with torch.no_grad():
        wanted = policy.logps(TokenBatch.of(lines))
    torch.testing.assert_close(torch.cat([one.rollout_logps_t for one in lines]), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_a_step_ahead_samples_with_the_weights_that_the_schedule_says(start, max_staleness):
    grpo, (running,) = ahead(start, max_staleness=max_staleness)
    weights, rollouts = seen_by(grpo)
    history = grpo.train(ROWS, progress=False)
    mismatch = [step["mismatch_kl"] for step in history.steps]
    assert mismatch[0] < 1e-9  # the first batch is drawn when it is needed
    assert all(one > 1e-7 for one in mismatch[1:])
    assert all("importance/mean" in step for step in history.steps)
    assert running.paths.count("/collective_rpc") == 6 - max_staleness  # the last steps' weights sample nothing
    other = as_policy(make_model())
    for number, lines in enumerate(rollouts):
        version = max(0, number - max_staleness)
        assert {one.versions for one in lines} == {(version,)}
        other.inner.load_state_dict(weights[version])
        check_logps(lines, other)
    folders = [path for path in grpo.sampler._folder.iterdir() if not path.name.startswith(".")]
    assert len(folders) <= 2  # those that no rollout needs are gone


@pytest.mark.parametrize(("algorithm", "options"), [(GRPO, {}), (GRPO, {"environment": Partner}), (OnlineDPO, {})])
@pytest.mark.parametrize("how", ["killed", "failed"])
def test_resuming_ahead_is_exact(start, tmp_path, algorithm, options, how):
    """The checkpoint has the completions that were under way, or in a step that failed: of weights that are no more."""
    whole, _ = ahead(start, algorithm, 2, **options)
    whole.train(ROWS, output_dir=tmp_path / "whole")
    folder = tmp_path / "whole"
    if how == "failed":
        folder = tmp_path / "failed"
        made, _ = ahead(start, algorithm, 2, **options)
        learn = made.learn

        def fails(*given):
            if made.state.step == 2:
                raise OSError("the disk is full")
            return learn(*given)

        made.learn = fails
        with pytest.raises(OSError, match="the disk is full"):
            made.train(ROWS, output_dir=folder)
    given = options or {"reward_fn": reward}
    resumed = algorithm.from_checkpoint(folder / "checkpoints/step-00000002.safetensors", **given)
    assert resumed.state.step == 2
    resumed.sampler.pool = ServerPool([Server(start(make_model()).url, resumed.config.server)])
    resumed.train(ROWS)
    assert resumed.state.step == 6
    for name, value in whole.module.state_dict().items():
        assert value.equal(resumed.module.state_dict()[name]), name


def test_a_server_that_is_gone_ahead_leaves_a_checkpoint(start, tmp_path):
    grpo, (running,) = ahead(start)
    learns = grpo.learn

    def learn(*given):
        if grpo.state.step == 1:
            grpo.sampler.pool.servers[0].config = ServerConfig(server_timeout=0.5)
            running.stop()
        return learns(*given)

    grpo.learn = learn
    count = itertools.count()  # of the requests of steps: two in each, the next step's while one is trained on
    running.spoil = lambda path, body: "dies" if body.get("n") == 4 and next(count) >= 4 else None
    with pytest.warns(UserWarning, match="asked again"), pytest.raises(ServerError, match="given up after") as raised:
        grpo.train(ROWS, output_dir=tmp_path)
    assert "the run up to step 2 is in" in raised.value.__notes__[0]
    resumed = GRPO.from_checkpoint(tmp_path / "checkpoints/step-00000002.safetensors", reward_fn=reward)
    resumed.sampler.pool = ServerPool([Server(start(make_model()).url, resumed.config.server)])
    assert len(resumed.train(ROWS).steps) == 4


class Disturbed:
    """Spoils what a server does once, while the queue is full: when the trainer is at step 2."""

    def __init__(self, how, running, model):
        self.how, self.running, self.model, self.hits = how, running, copy.deepcopy(model), 0
        running.spoil = self
        self.at = -1

    def __call__(self, path, body):
        if self.at < 2 or self.hits or path != "/v1/completions" or "prompt_logprobs" in body:
            return None
        self.hits += 1
        if self.how == "hangs":
            time.sleep(3)  # longer than server_timeout; its answer comes when nobody listens
            return None
        if self.how == "replaced":  # by a server at the same address with the weights of the beginning
            self.running.served.queue.call(
                lambda: self.running.served.policy.model.load_state_dict(self.model.state_dict())
            )
        return "dies"


@pytest.mark.parametrize("how", ["dies", "hangs", "replaced"])
@pytest.mark.parametrize("order", ["deterministic", "throughput"])
def test_a_server_disturbed_while_the_queue_is_full_loses_nothing(start, how, order):
    """Another server and the same one later do its work: every prompt is trained on once, with the weights it names.

    In order the run is that without a disturbance, bit for bit.
    """
    options = {"max_staleness": 2, "servers": 2, "server_timeout": 2.0, "server_requests": 2, "order": order}
    rows = [{"prompt": [4 + i, 3]} for i in range(12)]
    found = []
    for disturbed in (False, True):
        grpo, running = ahead(start, num_epochs=1, **options)
        weights, rollouts = seen_by(grpo)
        if disturbed:
            # one that hangs is given up, so another must be left
            spoilers = [Disturbed(how, one, grpo.module) for one in running[: 1 if how == "hangs" else 2]]
            step = grpo.step

            def watched(prompts, grpo=grpo, spoilers=spoilers, step=step):
                for one in spoilers:
                    one.at = grpo.state.step
                return step(prompts)

            grpo.step = watched
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            steps = grpo.train(rows, progress=False).steps
        if disturbed:
            assert any(one.hits for one in spoilers)
        starts = [lines[i].ids_T[0].item() for lines in rollouts for i in range(0, 8, 4)]
        dropped = sum(one["staleness/dropped_groups"] for one in steps)
        if not dropped:
            assert sorted(starts) == [4 + i for i in range(12)]
        other = as_policy(make_model())
        for lines in rollouts:
            for one in lines:
                other.inner.load_state_dict(weights[one.versions[0]])
                check_logps([one], other)
        found.append(grpo.module.state_dict())
    if order == "deterministic":
        for name, value in found[0].items():
            assert value.equal(found[1][name]), name


def test_a_server_that_keeps_the_old_weights_ahead_is_told(start, monkeypatch, tmp_path):
    """And what the queue held is trained on after a resume with a server that loads them."""
    grpo, (running,) = ahead(start, max_staleness=2)
    step = grpo.step

    def spoil(prompts):
        if grpo.state.step == 2:
            monkeypatch.setattr(running.served, "reload_weights", lambda path: None)
        return step(prompts)

    grpo.step = spoil
    with pytest.raises(ServerError, match="found the old ones"):
        grpo.train(ROWS, output_dir=tmp_path)
    assert grpo.state.step == 4  # the batches that were sampled before were trained on
    monkeypatch.undo()
    resumed = GRPO.from_checkpoint(tmp_path / "checkpoints/step-00000004.safetensors", reward_fn=reward)
    resumed.sampler.pool = ServerPool([Server(start(make_model()).url, resumed.config.server)])
    assert len(resumed.train(ROWS).steps) == 2


def test_a_server_works_with_one_version_of_the_weights_at_a_time(start):
    """It is told to load others only when it has answered all requests with the last."""
    grpo, running = ahead(start, max_staleness=2, servers=2, order="throughput", server_requests=3, num_steps=8)
    log, lock = [], threading.Lock()

    def watch(number):
        def spoil(path, body):
            with lock:
                log.append((number, "load" if path == "/collective_rpc" else "ask" if body.get("n") == 4 else "other"))
            if body.get("n") == 4:
                time.sleep(0.02)
                with lock:
                    log.append((number, "answered"))

        return spoil

    for number, one in enumerate(running):
        one.spoil = watch(number)
    grpo.train(ROWS, progress=False)
    for number in range(2):
        open_requests, loads = 0, 0
        for which, what in log:
            if which != number:
                continue
            open_requests += {"ask": 1, "answered": -1}.get(what, 0)
            loads += what == "load"
            assert what != "load" or not open_requests
        assert loads >= 2


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://127.0.0.1:x", "http://a:99999", 5, "ftp://a"])
def test_an_address_that_is_none_is_told_at_once(url):
    with pytest.raises((ValueError, TypeError), match="rollout_server must be"):
        ServerConfig(rollout_server=url)


# ---- a teacher ----


def distilled(teacher, **options):
    made = {"divergence": "sampled", "max_new_tokens": 6, "learning_rate": 1e-2, "batch_size": 4} | options
    return Distill(model=make_model(), teacher=teacher, **made)


def test_a_servers_teacher_is_the_same_one_here(start, tmp_path):
    """What a step says; a server that fails now and then is asked again; a checkpoint is told the address."""
    teacher = make_model(seed=1)
    running, failures = start(teacher, allow_sync=False), iter([(503, "busy"), None, "dies"])
    running.spoil = lambda *_: next(failures, None)
    near, far = distilled(teacher), distilled(running.url, micro_batch_size=2)
    for _ in range(3):
        found, wanted = far.train_step(PROMPTS), near.train_step(PROMPTS)
        for name in ("loss", "grad_norm", "distill/divergence", "completion/length"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-4)
    assert set(running.paths) == {"/v1/completions"}  # it keeps its weights
    far.save(tmp_path / "far.safetensors")
    again = Distill.from_checkpoint(tmp_path / "far.safetensors", teacher=running.url)
    assert again.train_step(PROMPTS)["loss"] == far.train_step(PROMPTS)["loss"]
    assert far.evaluate([{"prompt": prompt} for prompt in PROMPTS])["eval/distill/divergence"] > 0


def test_what_a_servers_teacher_cannot_give(start):
    for options, name in (({"divergence": "jsd"}, "divergence"), ({"temperature": 0.5}, "temperature")):
        with pytest.raises(ValueError, match=f"{name} must be .* with a server as teacher"):
            distilled("http://127.0.0.1:9", **options)
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9 does not answer"):
        distilled("http://127.0.0.1:9", server_timeout=0.1).train_step(PROMPTS)
    running = start(make_model())
    running.spoil = lambda *_: (200, json.dumps({"choices": [{"index": 0, "text": "a"}]}))
    with pytest.raises(ServerError, match="must give prompt_logprobs, found"):
        distilled(running.url).train_step(PROMPTS)
