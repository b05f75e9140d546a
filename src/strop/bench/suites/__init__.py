"""The suites by name. A suite module has `cases()`, a list of `harness.Measurable`, and where its rows are not timings
`summary(measured)`, a header and rows for the command line."""

SUITES = {
    "primitives": "advantages, KL and packing on the CPU against NumPy, torch and rlox",
    "engines": "the MoE transformer's engines against Mixtral, eager and compiled",
    "convergence": "every engine of the MoE from the same weights: a batch memorised, a language learned",
}
