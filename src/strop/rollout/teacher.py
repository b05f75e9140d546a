"""A teacher that a server has, a stock vLLM or `strop serve`: log-probs of tokens that are given, its `prompt_logprobs`."""

import concurrent.futures
import itertools
import time

import torch

from strop.data.batch import TokenBatch, on_device
from strop.rollout.client import Server, ServerConfig, Unreachable


class ServedTeacher:
    """Of a model at this address as `strop.models.Reference` of one that is here. Its weights stay what they are."""

    kind, model, policy = "server", None, None

    def __init__(self, url: str, config: ServerConfig):
        self.server, self.config = Server(url, config), config

    def logps(self, batch: TokenBatch, *, temperature: float = 1.0) -> torch.Tensor:
        """[n] of the tokens that count. One that fails is asked again until server_timeout has passed."""
        assert temperature == 1, "servers give log-probs at temperature 1"
        lines = [ids.tolist() for ids in batch.ids_N.split(batch.lengths)]
        with concurrent.futures.ThreadPoolExecutor(min(len(lines), self.config.server_requests)) as threads:
            rows = list(threads.map(self._asked, lines, batch.num_loss_tokens_S))
        logps_N = torch.tensor(list(itertools.chain(*rows)), dtype=torch.float64)
        return on_device(logps_N, batch.device).index_select(0, batch.places_n + 1)

    def _asked(self, ids: list[int], num_loss_tokens: int) -> list[float]:
        """Of every token, the first of which has none; nothing is asked of a line that does not count."""
        if not num_loss_tokens:
            return [0.0] * len(ids)
        start, wait = time.monotonic(), 0.1
        while True:
            try:
                return [0.0, *self.server.prompt_logps(ids)]
            except Unreachable:
                if time.monotonic() - start > self.config.server_timeout:
                    raise
                time.sleep(wait)
                wait = min(2 * wait, 5.0)
