"""`strop export RUN --gguf q8_0`: write a trained model as one file for other programs."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from strop._checks import check_choice
from strop.cli.options import option

FORMATS = ("f16", "q8_0")


def export(
    run: Annotated[str, typer.Argument(help="The folder of a run, or a model: a folder, a name, or smollm2.")],
    gguf: Annotated[str, option("The numbers of matrices: f16, or q8_0 (8.5 bits a weight).")] = "q8_0",
    output: Annotated[
        str | None, option("The file; by default model-q8_0.gguf in the run's or model's folder.")
    ] = None,
) -> None:
    """Write a model as one GGUF file for llama.cpp, Ollama and others: weights, tokenizer and chat template.

    Adapters are merged in. What such a file cannot hold is refused.
    """
    check_choice(gguf, "gguf", FORMATS)
    folder = Path(run).expanduser()
    path = Path(output).expanduser() if output else (folder if folder.is_dir() else Path()) / f"model-{gguf}.gguf"
    from strop.models.gguf import export_gguf
    from strop.models.loading import load_model
    from strop.models.quantized import merge_adapters
    from strop.training.folder import final_model

    quantize = None
    if (folder / "final").is_dir():
        quantize = json.loads((folder / "run.json").read_text(encoding="utf-8"))["config"].get("quantize")
        run = str(final_model(folder))
    model, tokenizer = load_model(run, device="cpu", quantize=quantize)
    export_gguf(merge_adapters(model), tokenizer, path, gguf)
    print(f"wrote {path} ({path.stat().st_size / 1e6:,.0f} MB)", file=sys.stderr)
