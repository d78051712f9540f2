"""The pages about losses say what the code does: their snippets run and their tables are complete."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

from stillroom.losses import LOSSES, TeacherSignal, make_loss, token_weights
from stillroom.losses.divergences import _demonstrate

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = (DOCS / "losses.md").read_text(encoding="utf-8")


def snippets(page):
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)


def test_the_snippets_of_the_losses_page_run():
    for snippet in snippets(PAGE):
        exec(compile(snippet, "losses.md", "exec"), {})


def test_the_loss_that_the_guide_adds_has_the_gradient_that_the_guide_writes():
    names = {}
    for snippet in snippets((DOCS / "add_a_loss.md").read_text(encoding="utf-8")):
        exec(compile(snippet, "add_a_loss.md", "exec"), names)
    student, teacher = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for signal in (TeacherSignal.dense(teacher), TeacherSignal.dense(teacher).keep_top_k(2)):
        logits = student.clone().requires_grad_()
        value = names["loss"].value(logits, signal)
        value.sum().backward()
        assert (value > 0).all()
        torch.testing.assert_close(names["loss"].grad(student, signal), logits.grad)


def test_every_row_has_a_line_in_the_table_and_in_the_table_of_tails():
    table = PAGE[PAGE.index("## The table") : PAGE.index("## The ends of JSD")]
    tails = PAGE[PAGE.index("## What happens to the tail") : PAGE.index("## Temperature")]
    for name, row in LOSSES.items():
        lines = [line for line in table.splitlines() if line.startswith(f"| `{name}` |")]
        assert len(lines) == 1, name
        assert row.reference in lines[0]
        assert all(f"`{option}`" in lines[0] for option in row.options)
        assert f"`{name}`" in tails


def test_the_page_shows_what_the_module_prints():
    assert _demonstrate() in PAGE


def test_the_page_shows_the_gradient_norms_of_report_34():
    student, teacher = torch.tensor([[1.0, 0, -1]]), torch.tensor([[0.0, 2, 0]])
    for scaled, label in ((False, "plain"), (True, "× temperature²")):
        loss = make_loss("forward_kl", scale_by_temperature_squared=scaled)
        cells = [
            f"{loss.grad(student, TeacherSignal.dense(teacher, temperature=t)).norm().item():#.3g}"
            for t in (1.0, 2.0, 4.0, 8.0)
        ]
        assert f"| {label} | {' | '.join(cells)} |" in PAGE


@pytest.mark.parametrize("module", ["divergences", "logspace", "pairs", "reduce", "signals", "spec", "table"])
def test_examples_in_docstrings_are_true(module):
    assert doctest.testmod(importlib.import_module(f"stillroom.losses.{module}")).failed == 0


def test_shapes_in_signatures_can_be_checked():
    checked = jaxtyped(typechecker=beartype)(inspect.unwrap(token_weights))
    assert checked(torch.ones(2, 3, dtype=torch.bool), 6).shape == (6,)
    with pytest.raises(TypeCheckError):
        checked(torch.ones(6, dtype=torch.bool), 6)
