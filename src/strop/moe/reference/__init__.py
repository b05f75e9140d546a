"""The transformer in NumPy, to be read: one file per layer, each forward with its backward below it.

Rules of the folder. A forward returns its result and `saved`, the tuple its backward opens. A backward takes the
gradient of the result and `saved`, and returns the gradients of the inputs, then of the weights, in the order of the
forward's arguments; it never adds into anything: the caller accumulates. Everything runs in the dtype of the weights,
float32 or float64.

Reading order: embedding, rms_norm, linear, softmax, rope, attention, swiglu, router, experts, moe, block, aux_loss,
cross_entropy, model; `layout` says how real tokens are taken out of a padded batch, `engine` ties it to the contract.

Shape suffixes, the same in every file:

    B rows of a batch    T tokens of a row      S keys a query can see    N real tokens of the batch, padding taken out
    D hidden             H query heads          K key/value heads         G = H/K query heads per key/value head
    C channels of a head P = C/2 rotated pairs  O outputs of a linear     V vocabulary
    E experts            J = top-k choices      A = N·J assignments       M tokens of one expert     F intermediate
"""
