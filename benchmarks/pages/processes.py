"""The suite `processes` on a page; and what many GPUs can be expected to reach, on paper, from a measured step of one."""

from typing import Any

from benchmarks.text import Result, duration, provenance, size, table

QWEN2_05B = 494e6  # parameters of the measured step
MODELS = {"7B": 7.6e9, "70B": 70.6e9}
# bytes a second that a GPU sends, 80 % of NVLink's 450 GB/s in a machine of 8 and of 400 Gb/s InfiniBand beyond
NETWORKS = {8: 0.8 * 450e9, 64: 0.8 * 50e9}
MEMORY = 141e9
FLOP = 8  # a parameter and token: 2 forward, 4 backward, 2 of the reference


def processes_table(result: Result) -> str:
    rows = []
    for case in result["cases"]:
        for name, facts in case["contenders"].items():
            found = case["ratios"].get(name)  # of times: below 1 is faster
            ratio = f"{found['value']:.3g}× [{found['low']:.3g}, {found['high']:.3g}]" if found else ""
            rows.append([case["work"], name, duration(facts["median_ns"]), ratio, size(facts["peak_bytes"])])
    steps = len(next(iter(result["cases"][0]["contenders"].values()))["samples_ns"])
    header = ["work", "by", "a step", "time as a multiple of one process's", "peak memory of a process"]
    return table(header, rows) + "\n" + provenance(result, f"{steps} steps of each side") + "\n"


def scaling_table(result: Result) -> str:
    """Expected, not measured: a GPU does the tokens of the measured step, at its arithmetic speed."""
    case = result["cases"][0]
    speed, tokens = _speed(case)
    rows = []
    for model, parameters in MODELS.items():
        for num_gpus, bandwidth in NETWORKS.items():
            state, copy = 18 * parameters / num_gpus, 2 * parameters
            compute = FLOP * parameters * tokens / speed
            # 16-bit weights in the reference's forward, the policy's and its backward; float32 gradients once
            sent = (3 * 2 + 4) * parameters * (num_gpus - 1) / num_gpus
            by_server = state + copy > 0.8 * MEMORY
            gather = 0.0 if by_server else copy / bandwidth
            efficiency = compute / (max(compute, sent / bandwidth) + gather)
            fits = state < 0.8 * MEMORY
            rows.append([
                model, str(num_gpus), size(state), "a server" if by_server else size(copy),
                f"{compute:.1f} s", size(sent), f"{sent / bandwidth:.2f} s",
                f"{100 * efficiency:.0f} %" if fits else "does not fit",
            ])  # fmt: skip
    header = ["model", "GPUs", "weights and optimiser a GPU", "whole copy for rollouts", "arithmetic", "sent by a GPU",
              "takes", "efficiency of training"]  # fmt: skip
    told = f"Arithmetic at {speed / 1e12:.0f} TFLOP/s, as measured: {provenance(result, '')}".rstrip()
    return table(header, rows) + "\n" + told + "\n"


def _speed(case: dict[str, Any]) -> tuple[float, float]:
    """FLOP a second from the end of generation to the end of the update, and the tokens of the step."""
    labels, facts = case["labels"], case["contenders"]["strop"]
    tokens = labels["completions"] * (labels["prompt_tokens"] + labels["new_tokens"])
    seconds = 1e-9 * (facts["median_ns"] - facts["phases_ns"]["generate"])
    return FLOP * QWEN2_05B * tokens / seconds, tokens
