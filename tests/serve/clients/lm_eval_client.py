"""lm-eval against a server: `python lm_eval_client.py URL MODEL FOLDER`, as `make test-clients` runs it.

Prints the results of a tiny task with log-likelihoods and of a tiny task that generates, as one line of JSON.
"""

import json
import os
import sys
from pathlib import Path

os.environ["HF_DATASETS_OFFLINE"] = "1"

import lm_eval
from lm_eval.tasks import TaskManager

DOCUMENTS = [
    {"question": "name", "choices": ["yes", "no"], "answer": 0},
    {"question": "age", "choices": ["1", "22"], "answer": 1},
]
TASKS = {
    "tiny_choice": {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer"},
    "tiny_text": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def main(url: str, model: str, folder: str) -> None:
    data = Path(folder) / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, task in TASKS.items():
        common = {
            "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test", "doc_to_text": "{{question}}",
        }  # fmt: skip
        (Path(folder) / f"{name}.yaml").write_text(json.dumps(common | task))  # JSON is YAML
    options = {
        "base_url": f"{url}/v1/completions", "model": model, "tokenizer_backend": "remote", "max_length": 400,
        "num_concurrent": 1,
    }  # fmt: skip
    done = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=",".join(f"{k}={v}" for k, v in options.items()),
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    told = {name: [sample["resps"] for sample in done["samples"][name]] for name in TASKS}
    print(json.dumps({"results": done["results"], "responses": told}))


if __name__ == "__main__":
    main(*sys.argv[1:])
