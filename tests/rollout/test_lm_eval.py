"""lm-eval-harness, the real package, measures a model behind `strop serve`: the numbers are those of a forward.

`make test-agents` installs the package; elsewhere this test is skipped.
"""

import json
import math

import pytest
import torch
from tiny_models import llama
from tiny_tokenizers import hugging_face

from strop.models import as_policy
from strop.rollout.openai_server import OpenAIServer
from strop.rollout.served_model import ServedModel

CHOICES = [
    {"question": "ab?", "options": ["cd", "fab", "e"], "right": 1}, {"question": "dab", "options": ["b", "acac"], "right": 0},
    {"question": "fed", "options": ["a", "b", "cab"], "right": 2},
]  # fmt: skip
TASKS = {
    "choices": """
task: choices
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{options}}"
doc_to_target: right
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "following": """
task: following
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{options[0]}}"
target_delimiter: ""
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "writing": """
task: writing
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{options[0]}}"
generation_kwargs: {until: ["b"], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
""",
}


def test_the_harness_measures_what_a_forward_does(tmp_path, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("OPENAI_API_KEY", "any")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tokenizer = hugging_face()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = llama(eos_token_id=tokenizer.eos_token_id, vocab_size=len(tokenizer), max_length=64)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHOICES))
    source = f"dataset_path: json\ntest_split: test\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
    for name, text in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(text + source)

    def logps(question, option):
        asked, said = (tokenizer.encode(text, add_special_tokens=False) for text in (question, option))
        with torch.no_grad():
            logps_TV = model(torch.tensor([asked + said])).logits[0].log_softmax(-1)
        return [
            (logps_TV[len(asked) - 1 + i, token] - 0, logps_TV[len(asked) - 1 + i].max())
            for i, token in enumerate(said)
        ]

    served = ServedModel(as_policy(model, tokenizer), "tiny")
    server = OpenAIServer(served).start()
    try:
        options = {
            "base_url": f"{server.url}/v1/completions", "model": "tiny", "tokenizer": str(tmp_path / "tokenizer"),
            "tokenizer_backend": "huggingface", "max_length": 64, "batch_size": 2, "num_concurrent": 2, "max_retries": 1,
        }  # fmt: skip
        found = lm_eval.simple_evaluate(
            "local-completions", model_args=options, tasks=list(TASKS), log_samples=True,
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False), bootstrap_iters=0,
        )  # fmt: skip
    finally:
        server.stop()
        served.close()
    best = [max(range(len(row["options"])), key=lambda i: sum(own for own, _ in logps(row["question"], row["options"][i])))
            for row in CHOICES]  # fmt: skip
    assert (
        found["results"]["choices"]["acc,none"]
        == sum(i == row["right"] for i, row in zip(best, CHOICES, strict=True)) / 3
    )
    each = [logps(row["question"], row["options"][0]) for row in CHOICES]
    mean = sum(float(own) for one in each for own, _ in one) / 3
    assert found["results"]["following"]["perplexity,none"] == pytest.approx(math.exp(-mean), rel=1e-5)
    greedy = sum(all(own == top for own, top in one) for one in each) / 3
    assert found["results"]["following"]["acc,none"] == greedy
    for sample in found["samples"]["choices"]:
        said = [float(value) for value, _ in sample["filtered_resps"]]
        wanted = [
            float(sum(own for own, _ in logps(sample["doc"]["question"], one))) for one in sample["doc"]["options"]
        ]
        assert said == pytest.approx(wanted, abs=1e-5)
    assert all("b" not in sample["resps"][0][0] for sample in found["samples"]["writing"])
