"""The transformer in NumPy, written for reading: one file per layer, each forward with its backward below it.

Rules of the folder. A forward returns its result and `saved`, a tuple that its backward unpacks. A backward takes the
gradient of the result and `saved`, and returns the gradients of the inputs, then of the weights, in the order of the
forward's arguments. It never adds to an existing gradient: the caller accumulates. Everything runs in the weights'
dtype, float32 or float64.

Reading order: embedding, rms_norm, linear, softmax, rope, attention, swiglu, router, experts, moe, block, aux_loss,
cross_entropy, model. `layout` removes padding from a batch, `engine` implements the contract of `strop.moe.engine`.

Shape suffixes, the same in every file:

    B rows of a batch    T tokens of a row      S keys a query can see    N real tokens of the batch, padding taken out
    D hidden             H query heads          K key/value heads         G = H/K query heads per key/value head
    C channels of a head P = C/2 rotated pairs  O outputs of a linear     V vocabulary
    E experts            J = top-k choices      A = N·J assignments       M tokens of one expert     F intermediate
"""
