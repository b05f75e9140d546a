"""The whole transformer on the real tokens of a batch. Shapes: N tokens, D hidden, E experts, V vocabulary."""

from strop.moe.reference.aux_loss import aux_loss, aux_loss_bwd
from strop.moe.reference.block import block, block_bwd
from strop.moe.reference.embedding import embedding, embedding_bwd
from strop.moe.reference.linear import linear, linear_bwd
from strop.moe.reference.rms_norm import rms_norm, rms_norm_bwd
from strop.moe.reference.rope import rope_angles

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def hidden_states(params, config, tokens_N, layout, caches=None, *, keep):
    """h = norm(block_L(… block_1(embedding(tokens))))

    caches   one (keys, values) per layer, or None
    keep     save all activations for a backward; else each block's are freed when the next block runs
    """
    x_ND, embedding_saved = embedding(tokens_N, params[EMBEDDING])
    angles = rope_angles(layout.positions_N, config.head_dim, config.rope_theta, x_ND.dtype)
    routings, blocks_saved = [], []
    for layer in range(config.num_layers):
        weights = _layer_weights(params, layer)
        cache = None if caches is None else caches[layer]
        x_ND, routing, saved = block(x_ND, weights, config, angles, layout, cache)
        routings.append(routing)
        blocks_saved.append(saved if keep else None)
    h_ND, norm_saved = rms_norm(x_ND, params[NORM], config.rms_norm_eps)
    return h_ND, routings, (embedding_saved, blocks_saved, norm_saved)


def head(params, h_ND):
    """logits = h·Wᵀ with the head's weights, or with tied embeddings the embedding's"""
    return linear(h_ND, params[HEAD] if HEAD in params else params[EMBEDDING])


def forward(params, config, tokens_N, layout):
    """Return the logits, the auxiliary loss (without its coefficient) and the data for the backward."""
    h_ND, routings, hidden_saved = hidden_states(params, config, tokens_N, layout, keep=True)
    logits_NV, head_saved = head(params, h_ND)
    aux, aux_saved = aux_loss(*zip(*routings, strict=True))
    return logits_NV, aux, (hidden_saved, head_saved, aux_saved, config)


def backward(dlogits_NV, daux, saved):
    """Return {name: gradient} of every parameter, given dL/dlogits and dL/daux."""
    (embedding_saved, blocks_saved, norm_saved), head_saved, aux_saved, config = saved
    grads = {}
    dh_ND, dhead_VD = linear_bwd(dlogits_NV, head_saved)                        # logits = h·Wᵀ
    dx_ND, grads[NORM] = rms_norm_bwd(dh_ND, norm_saved)                        # h = norm(x)
    dp_aux_E = aux_loss_bwd(daux, aux_saved)                                    # one share for every router
    for layer in reversed(range(config.num_layers)):
        dx_ND, layer_grads = block_bwd(dx_ND, dp_aux_E, blocks_saved[layer])
        grads.update({f"model.layers.{layer}.{name}": grad for name, grad in layer_grads.items()})
    grads[EMBEDDING] = embedding_bwd(dx_ND, embedding_saved)                    # x = W[token]
    if config.tie_embeddings:
        grads[EMBEDDING] += dhead_VD                                            # one matrix, used at both ends
    else:
        grads[HEAD] = dhead_VD
    return {name: grads[name] for name in config.parameter_shapes()}


def _layer_weights(params, layer):
    prefix = f"model.layers.{layer}."
    return {name[len(prefix) :]: array for name, array in params.items() if name.startswith(prefix)}
