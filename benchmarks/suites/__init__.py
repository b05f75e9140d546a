"""The suites by name. A suite module has `cases()`, a list of `harness.Measurable`, where its rows are not plain timings
`summary(measured)`, a header and rows for the command line, and `ON_GPU = True` where it runs on a GPU if there is one."""

SUITES = {
    "primitives": "advantages, KL and packing on the CPU against NumPy, torch and rlox",
    "engines": "the MoE transformer's engines against Mixtral, eager and compiled",
    "convergence": "every engine of the MoE from the same weights: a batch memorised, a language learned",
    "losses": "the operators against eager torch, torch.compile, Liger and the floor, on a GPU if there is one",
    "generation": "rollouts against transformers and vLLM, on a GPU if there is one",
    "processes": "a GRPO step in several processes against one",
    "step": "a whole GRPO step against TRL, on a GPU if there is one",
    "demo": "`strop demo` on three seeds",
    "algorithms": "every algorithm learns to sort digits on a CPU, with three seeds",
    "learning": "SmolLM2-135M-Instruct learns to add with GRPO, on a GPU if there is one",
}
