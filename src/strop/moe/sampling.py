"""Sampling of a token from logits: temperature, then top-k, then top-p, then one draw by inverting the CDF.

Shapes: B rows, V vocabulary.
"""

import numpy as np

from strop._checks import as_count, as_number


def sampling_logps(
    logits_BV: np.ndarray, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> np.ndarray:
    """Return the log-probs of the sampling distribution, float64; −inf for a token that cannot be drawn.

    temperature  softmax(logits / temperature), above 0
    top_k        keep only the k most probable tokens; 0 is all
    top_p        keep only the smallest set of most probable tokens that reaches top_p, after top_k; 1 is all
                 (Holtzman et al. 2020). Among equally probable tokens the lower id comes first.
    """
    check_sampling(temperature, top_k, top_p)
    check_temperature(temperature)
    z_BV = logits_BV.astype(np.float64)
    logps_BV = _log_softmax((z_BV - z_BV.max(-1, keepdims=True)) / temperature)  # the maximum is 0 at any temperature
    if top_k or top_p < 1:
        order_BV = np.argsort(-logps_BV, axis=-1, kind="stable")
        if top_k:
            np.put_along_axis(logps_BV, order_BV[:, top_k:], -np.inf, axis=-1)
            logps_BV = _log_softmax(logps_BV)
        if top_p < 1:
            sorted_BV = np.take_along_axis(logps_BV, order_BV, axis=-1)
            p_BV = np.exp(sorted_BV)
            before_BV = np.cumsum(p_BV, axis=-1) - p_BV  # total probability of the tokens before this one
            before_BV[:, 0] = 0.0  # the most probable token always stays
            np.put_along_axis(logps_BV, order_BV, np.where(before_BV < top_p, sorted_BV, -np.inf), axis=-1)
            logps_BV = _log_softmax(logps_BV)
    return logps_BV


def sample(
    logits_BV: np.ndarray, uniforms_B: np.ndarray, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens_B (int64) and the log-prob of each under the distribution it was drawn from (float64).

    uniforms_B   one number in [0, 1) per row: the token is the first whose cumulative probability exceeds it
    temperature  0 is greedy: the most probable token. Its log-prob is that under softmax(logits), because under a
                 distribution with one token it would always be 0
    """
    check_sampling(temperature, top_k, top_p)
    rows_B = np.arange(len(logits_BV))
    if temperature == 0:
        tokens_B = logits_BV.argmax(-1)
        return tokens_B, _log_softmax(logits_BV.astype(np.float64))[rows_B, tokens_B]
    logps_BV = sampling_logps(logits_BV, temperature=temperature, top_k=top_k, top_p=top_p)
    cdf_BV = np.cumsum(np.exp(logps_BV), axis=-1)
    # u·total < total, so the token found has a probability above 0
    tokens_B = (cdf_BV <= (uniforms_B * cdf_BV[:, -1])[:, None]).sum(-1)
    return tokens_B, logps_BV[rows_B, tokens_B]


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    as_number(temperature, "temperature", 0)
    as_count(top_k, "top_k")
    as_number(top_p, "top_p", 0, 1, open_low=True)


def check_temperature(temperature: float) -> None:
    """Raise unless softmax(logits / temperature) is defined for this temperature."""
    as_number(temperature, "temperature", 0, open_low=True)


def _log_softmax(z_BV: np.ndarray) -> np.ndarray:
    z_BV = z_BV - z_BV.max(-1, keepdims=True)
    return z_BV - np.log(np.exp(z_BV).sum(-1, keepdims=True))
