"""The bridge to lm-evaluation-harness, on a local task file, against our own figures."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
import torch

from stillroom.data.tasks import load_task
from stillroom.errors import ConfigError, MissingExtraError
from stillroom.evaluation.likelihood import multiple_choice_accuracy
from stillroom.evaluation.lm_eval_bridge import _figures, evaluate_lm_eval

YAML = """
task: local_arc
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: multiple_choice
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{choices.label.index(answerKey)}}}}"
doc_to_choice: "{{{{choices.text}}}}"
metric_list:
  - metric: acc
  - metric: acc_bytes
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


def test_without_the_harness_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for name in [name for name in sys.modules if name.startswith("lm_eval.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtraError, match=r"stillroom\[lm-eval\]"):
        evaluate_lm_eval(None, None, ["lm-eval:arc_easy"])  # type: ignore[arg-type]


def test_the_harness_figures_are_read_with_their_standard_errors() -> None:
    figures = {
        "alias": "x",
        "sample_len": 7,
        "acc,none": 0.5,
        "acc_stderr,none": 0.1,
        "exact_match,strict": 0.25,
        "exact_match_stderr,strict": 0.05,
        "word_perplexity,none": 9.0,
        "word_perplexity_stderr,none": "N/A",
    }
    assert _figures(figures) == [
        ("acc", 0.5, 0.1),
        ("exact_match,strict", 0.25, 0.05),
        ("word_perplexity", 9.0, None),
    ]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="the lm-eval extra is not installed")
def test_the_harness_and_our_own_scores_agree_on_arc_easy(shared, tmp_path, monkeypatch) -> None:
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = shared / "models" / "stories260k"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (tmp_path / "arc.yaml").write_text(YAML.format(file=shared / "data/arc_easy/test.jsonl"))
    state = torch.get_rng_state().clone()
    theirs, samples = evaluate_lm_eval(
        model, tokenizer, ["lm-eval:local_arc"], include_path=tmp_path, limit=100
    )
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    examples = list(load_task("arc_easy", shared / "data").examples("test"))[:100]
    ours, records = multiple_choice_accuracy(model, tokenizer, examples)
    for their_name, our_name in (("acc", "acc"), ("acc_bytes", "acc_norm")):
        estimate = theirs[f"lm-eval:local_arc/{their_name}"]
        assert estimate.value == pytest.approx(ours[our_name].value)
        assert (estimate.n, estimate.level) == (100, 0.95)
        assert estimate.low < estimate.value < estimate.high
    for sample, record in zip(samples, records, strict=True):
        sums = [response[0][0] for response in sample["resps"]]
        assert sums == pytest.approx(record["options_nats"], abs=1e-3)
    with pytest.raises(ConfigError, match=r"unknown lm-eval task 'local_ark'. Did you mean 'local_arc'"):
        evaluate_lm_eval(model, tokenizer, ["lm-eval:local_ark"], include_path=tmp_path)
