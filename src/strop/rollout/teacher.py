"""A teacher on a server, a stock vLLM or `strop serve`: log-probs of given tokens, from `prompt_logprobs`."""

import concurrent.futures
import itertools
import time

import torch

from strop.data.batch import TokenBatch, on_device
from strop.rollout.client import Server, ServerConfig, Unreachable


class ServedTeacher:
    """A teacher behind a server, with the interface of `strop.models.Reference`. Its weights are never changed."""

    kind, model, policy = "server", None, None

    def __init__(self, url: str, config: ServerConfig):
        self.server, self.config = Server(url, config), config

    def logps(self, batch: TokenBatch, *, temperature: float = 1.0) -> torch.Tensor:
        """Return [n], the log-probs of the loss tokens. A failing server is asked again until it is given up."""
        assert temperature == 1, "servers give log-probs at temperature 1"
        sequences = [ids.tolist() for ids in batch.ids_N.split(batch.lengths)]
        with concurrent.futures.ThreadPoolExecutor(min(len(sequences), self.config.server_requests)) as threads:
            rows = list(threads.map(self._asked, sequences, batch.num_loss_tokens_S))
        logps_N = torch.tensor(list(itertools.chain(*rows)), dtype=torch.float64)
        return on_device(logps_N, batch.device).index_select(0, batch.places_n + 1)

    def _asked(self, ids: list[int], num_loss_tokens: int) -> list[float]:
        """Return a log-prob for every token, 0 for the first. A sequence without loss tokens is not sent."""
        if not num_loss_tokens:
            return [0.0] * len(ids)
        start, wait = time.monotonic(), 0.1
        while True:
            try:
                return [0.0, *self.server.prompt_logps(ids)]
            except Unreachable:
                if time.monotonic() - start > self.server.patience:
                    raise
                time.sleep(wait)
                wait = min(2 * wait, 5.0 if self.server.has_answered else 0.5)
