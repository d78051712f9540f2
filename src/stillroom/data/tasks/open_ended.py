"""Instructions with free answers: Dolly, Self-Instruct (arXiv:2212.10560), the Vicuna questions.

No function can say whether such an answer is right, so these tasks have no verifier and asking for a score
is an error. They are measured by the likelihood of their reference text (`stillroom.evaluation.likelihood`)
and used for their prompts. Reference answers written by a closed model (Vicuna's) are not offered as gold.
"""

from __future__ import annotations

from stillroom.data.tasks.reading import Row, RowTask, Source
from stillroom.errors import ConfigError
from stillroom.types import Example


class OpenEnded(RowTask):
    """Prompts, and reference texts where the data has them."""

    def score(self, example: Example, completion: str) -> float | None:
        """There is no verifier.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"task {self.name!r} has free answers and no verifier, so completions of {example.id!r} cannot be "
            "scored. Measure it by likelihood, or choose a task with a verifier (see `stillroom tasks`)."
        )


def _instruction(row: Row, text: str, given: str = "") -> str:
    """Instruction, an empty line, the input if there is one, and a line break before the answer."""
    if not text.strip():
        row.refuse("an empty instruction", "a text")
    return f"{text.strip()}\n\n{given.strip()}\n" if given.strip() else f"{text.strip()}\n"


def dolly(source: Source) -> OpenEnded:
    """databricks-dolly-15k, the 1,000 rows of its category ``closed_qa`` that are at hand."""

    def read(row: Row) -> Example:
        prompt = _instruction(row, row.take("instruction", str), row.take("context", str))
        text = row.take("response", str)
        return Example(
            row.id, prompt, answer=text, completion=text, meta={"category": row.take("category", str)}
        )

    return OpenEnded(source, read)


def self_instruct(source: Source) -> OpenEnded:
    """User-oriented instructions (``test``, the evaluation set of MiniLLM) and seed tasks (``train``)."""

    def read(row: Row) -> Example:
        instances = row.take("instances", list)
        if len(instances) != 1:
            row.refuse(f"{len(instances)} instances", "exactly one, as in the published files")
        instance = Row(f"{row.where}, instance", row.id, instances[0])
        prompt = _instruction(row, row.take("instruction", str), instance.take("input", str))
        text = instance.take("output", str)
        return Example(row.take("id", str), prompt, answer=text, completion=text)

    return OpenEnded(source, read)


def vicuna(source: Source) -> OpenEnded:
    """The 80 questions of the Vicuna bench: prompts only."""

    def read(row: Row) -> Example:
        turns = row.take("turns", list)
        if len(turns) != 1 or not isinstance(turns[0], str):
            row.refuse(f"turns = {turns!r}", "one question")
        identity = f"vicuna/{row.take('question_id', int)}"
        meta = {"category": row.take("category", str)}
        return Example(identity, _instruction(row, turns[0]), answer="", meta=meta)

    return OpenEnded(source, read)
