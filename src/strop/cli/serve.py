"""`strop serve MODEL`: serve a trained model for chat, or sample rollouts for training on another machine."""

import functools
import sys
from typing import Annotated

import typer

from strop._types import Json
from strop.cli.generate import ABOUT_MODEL
from strop.cli.job import JobConfig, job_options, load_model_and_tokenizer, load_task
from strop.cli.options import number_option, option, with_options


def serve(
    model: Annotated[str, typer.Argument(help=ABOUT_MODEL)],
    host: Annotated[str, option("0.0.0.0 lets other machines ask too; then --api-key is needed.")] = "127.0.0.1",
    port: Annotated[int, number_option("0 is any that is free.", high=65535)] = 8000,
    api_key: Annotated[
        str | None, option("What clients must send; better given in the environment.", envvar="STROP_API_KEY")
    ] = None,
    allowed_host: Annotated[list[str] | None, option("A further name by which clients ask for this machine.")] = None,
    served_model_name: Annotated[str | None, option("The name clients ask for; by default MODEL.")] = None,
    max_batch: Annotated[int | None, number_option("Completions decoded together; 64, or 256 on a GPU.", low=1)] = None,
    allow_sync: Annotated[bool, option("Let clients exchange the weights: for a training's rollouts.")] = False,
    sync_folder: Annotated[
        str | None, option("With --allow-sync: where weights are loaded from; by default the temporary folder.")
    ] = None,
    *,
    given: Json,
) -> None:
    """An OpenAI-compatible server: /v1/completions and /v1/chat/completions, also as streams."""
    if sync_folder is not None and not allow_sync:
        raise ValueError(f"sync_folder must not be given without --allow-sync, found {sync_folder!r}")
    from strop.rollout.openai_server import OpenAIServer, check_exposure
    from strop.rollout.served_model import ServedModel

    check_exposure(host, api_key)  # before a model is loaded
    job = JobConfig(model=model).changed(given)
    loaded, its_tokenizer = load_model_and_tokenizer(job, load_task(job))
    from strop.models import as_policy

    policy = as_policy(loaded.eval(), its_tokenizer)
    served = ServedModel(policy, served_model_name or model, sync_folder=sync_folder, max_batch=max_batch)
    server = OpenAIServer(served, host, port, allow_sync=allow_sync, api_key=api_key, allowed_hosts=allowed_host or ())
    told = f"serving {served.name} at {server.url}"
    server.serve_forever(functools.partial(print, told, file=sys.stderr, flush=True))


command = with_options(serve, job_options("task", "tokenizer", "dtype", "device"))
