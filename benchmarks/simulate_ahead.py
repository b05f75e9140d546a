"""What sampling ahead can be expected to bring on 8 and 64 GPUs: a simulation with the measured times of one H200.

    python -m benchmarks.simulate_ahead          # writes benchmarks/results/ahead.json; about 25 s

Discrete events: completions of random lengths take places on servers, groups wait for their rewards, and a step begins
when its groups are there. Times of training and of a token are those of the measured step, scaled by parameters.
"""

import heapq
import json
import random
from typing import Any, NamedTuple

from benchmarks import ROOT
from benchmarks.harness import load
from benchmarks.pages.processes import FLOP, MEMORY, MODELS, QWEN2_05B, _speed

GROUP, GROUPS_PER_GPU, STEPS, WARM_UP = 8, 8, 30, 8
GPUS_PER_SERVER = {"7B": 1, "70B": 4}
PLACES = 64  # completions that a server draws at the same time, as many as in the measured step
MEDIAN_LENGTH, SPREAD, LONGEST, PROMPT = 800, 0.8, 8192, 64  # of completions: log-normal, in tokens
REWARD_SECONDS, SYNC_BANDWIDTH = 0.2, 0.8 * 50e9
STALENESS = (0, 1, 2, 4)


class Setting(NamedTuple):
    """A cluster: GPUs that train, servers, seconds of a token, of a trained token and of loading weights."""

    num_trainers: int
    num_servers: int
    token: float
    trained_token: float
    sync: float
    num_groups: int


def steps_per_hour(setting: Setting, max_staleness: int, throughput: bool = False) -> float:
    """Return the simulated steps an hour, after a warm-up."""
    draw = random.Random(0)
    lengths = [
        [[min(LONGEST, max(1, round(draw.lognormvariate(0, SPREAD) * MEDIAN_LENGTH))) for _ in range(GROUP)]
         for _ in range(setting.num_groups)]
        for _ in range(STEPS)
    ]  # fmt: skip
    seconds = [setting.trained_token * sum(sum(group) + PROMPT * GROUP for group in step) for step in lengths]
    ends = (_throughput if throughput else _in_order)(setting, max_staleness, lengths, seconds)
    return 3600 * (STEPS - WARM_UP) / (ends[-1] - ends[WARM_UP - 1])


def _in_order(setting: Setting, k: int, lengths: list[list[list[int]]], seconds: list[float]) -> list[float]:
    """Return when each step ends: servers sample one step's prompts at a time, with the weights of k steps before."""
    starts: list[float] = []
    ends: list[float] = []
    sampled = 0.0
    for step in range(STEPS):
        # the weights of step s - k are there when that step begins; with 0 that is the end of the step before
        weights = 0.0 if step <= k else starts[step - k] if k else ends[step - 1]
        free = [max(sampled, weights) + setting.sync] * (setting.num_servers * PLACES)
        for length in (length for group in lengths[step] for length in group):
            heapq.heapreplace(free, free[0] + length * setting.token)
        sampled = max(free)
        starts.append(max(ends[-1] if ends else 0.0, sampled + REWARD_SECONDS))
        ends.append(starts[-1] + seconds[step])
    return ends


def _throughput(setting: Setting, k: int, lengths: list[list[list[int]]], seconds: list[float]) -> list[float]:
    """Return when each step ends: it takes the groups that are ready first, of at most (k + 1) steps that were begun.

    A server that has older weights than the trainer finishes its completions before it loads them.
    """
    groups = [group for step in lengths for group in step]
    free, running = [PLACES] * setting.num_servers, [0] * setting.num_servers
    version, blocked = [0] * setting.num_servers, [0.0] * setting.num_servers
    events: list[tuple[float, int, int]] = []  # time, server or −1 for the trainer, places that become free
    begun = taken = ready = step = 0
    ends: list[float] = []
    waiting: list[float] = []  # when groups are rewarded
    now, trains = 0.0, False
    while len(ends) < STEPS:
        while waiting and waiting[0] <= now:
            heapq.heappop(waiting)
            ready += 1
        if not trains and ready >= setting.num_groups:
            ready, taken, trains = ready - setting.num_groups, taken + setting.num_groups, True
            heapq.heappush(events, (now + seconds[step], -1, 0))
        limit = min((step + k + 1) * setting.num_groups, len(groups))
        for server in sorted(range(setting.num_servers), key=lambda one: running[one]):
            if version[server] < step and not running[server]:
                version[server], blocked[server] = step, now + setting.sync
                heapq.heappush(events, (blocked[server], server, 0))
            while version[server] == step and blocked[server] <= now and free[server] >= GROUP and begun < limit:
                done = [now + length * setting.token for length in groups[begun]]
                for one in done:
                    heapq.heappush(events, (one, server, 1))
                heapq.heappush(waiting, max(done) + REWARD_SECONDS)
                heapq.heappush(events, (max(done) + REWARD_SECONDS, server, 0))
                begun, free[server], running[server] = begun + 1, free[server] - GROUP, running[server] + GROUP
        now, server, places = heapq.heappop(events)
        if server < 0:
            ends.append(now)
            step, trains = step + 1, False
        else:
            free[server], running[server] = free[server] + places, running[server] - places
    return ends


def simulated(speed: float, token: float) -> list[dict[str, Any]]:
    """Return the steps an hour by staleness in both orders, for every model, number of GPUs and of servers."""
    found: list[dict[str, Any]] = []
    for model, parameters in MODELS.items():
        for num_gpus in (8, 64):
            for share in range(1, 8):
                num_servers, left = divmod(num_gpus * share // 8, GPUS_PER_SERVER[model])
                num_trainers = num_gpus - num_gpus * share // 8
                if left or not num_servers or 18 * parameters / num_trainers > 0.8 * MEMORY:
                    continue  # no whole servers, or weights and optimiser do not fit
                setting = Setting(
                    num_trainers, num_servers, token * parameters / QWEN2_05B / GPUS_PER_SERVER[model],
                    FLOP * parameters / speed / num_trainers, 2 * parameters / SYNC_BANDWIDTH, GROUPS_PER_GPU * num_gpus,
                )  # fmt: skip
                orders = {
                    order: [steps_per_hour(setting, k, order == "throughput") for k in STALENESS if k or order != "throughput"]
                    for order in ("deterministic", "throughput")
                }  # fmt: skip
                found.append({"model": model, "gpus": num_gpus, "servers": num_servers, **orders})
    return found


def main() -> None:
    source = ROOT / "benchmarks/results/step-h200.json"
    result = load(source)
    case = result["cases"][0]
    token = 1e-9 * case["contenders"]["strop"]["phases_ns"]["generate"] / case["labels"]["new_tokens"]
    speed = _speed(case)[0]
    labels = {"staleness": STALENESS, "median_length": MEDIAN_LENGTH, "spread": SPREAD, "longest": LONGEST,
              "reward_seconds": REWARD_SECONDS, "places": PLACES, "flop_per_second": speed, "token_seconds": token}  # fmt: skip
    kept = {name: value for name, value in result.items() if name != "cases"}
    made = kept | {"suite": "ahead", "labels": labels, "cases": simulated(speed, token)}
    (ROOT / "benchmarks/results/ahead.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
