"""``stillroom evaluate --tasks lm-eval:NAME`` hands over to lm-evaluation-harness.

For figures that must be made exactly as everybody else makes them, use the program that everybody else
uses. It brings many packages, so it is an extra and is imported only here, only when asked. Its built-in
tasks download their data; a folder of task files with local data works without a network (``include_path``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stillroom import stats
from stillroom.errors import ConfigError, DataError, MissingExtraError, unknown_name
from stillroom.models.modes import evaluation_mode
from stillroom.types import Estimate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PREFIX = "lm-eval:"
"""Before a task's name on the command line."""


def require_lm_eval(names: Sequence[str] = (), include_path: str | Path | None = None) -> None:
    """Find out whether the harness is installed and knows the tasks, before anything is computed.

    Raises:
        MissingExtraError: it is not installed.
        ConfigError: it does not know one of the names.
    """
    try:
        import_module("lm_eval.evaluator")
    except ImportError as problem:
        raise MissingExtraError(
            f"tasks named {PREFIX}NAME are run by lm-evaluation-harness, which is not installed ({problem}). "
            "Install it with: pip install 'stillroom[lm-eval]', or use one of Stillroom's own tasks."
        ) from problem
    if names:
        _task_manager(names, include_path)


def _task_manager(names: Sequence[str], include_path: str | Path | None) -> Any:
    tasks: Any = import_module("lm_eval.tasks")
    manager = tasks.TaskManager(include_path=include_path)
    for name in names:
        if name not in manager.all_tasks:
            raise ConfigError(_unknown(name, manager.all_tasks, include_path))
    return manager


@contextmanager
def _reachable(names: Sequence[str]) -> Iterator[None]:
    """The harness downloads the data of its built-in tasks; without a network that is one clear error."""
    try:
        yield
    except (ConnectionError, FileNotFoundError) as problem:
        raise DataError(
            f"lm-evaluation-harness cannot get the data of {', '.join(names)}: {problem}. Its built-in tasks are "
            "downloaded. Go online, or give a folder of task files with local data (--data-dir)."
        ) from problem


def evaluate_lm_eval(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    names: Sequence[str],
    *,
    include_path: str | Path | None = None,
    limit: int | None = None,
    use_chat_template: bool = False,
    batch_size: int = 8,
    level: float = 0.95,
) -> tuple[dict[str, Estimate], list[dict[str, Any]]]:
    """Run tasks of lm-evaluation-harness on a model in memory.

    Args:
        model: left in the mode it is in.
        tokenizer: of the model.
        names: the harness's task or group names, with or without ``lm-eval:``.
        include_path: folder of further task YAML files.
        limit: first so many documents of each task; default all.
        use_chat_template: the harness's ``apply_chat_template``; its default is off, for comparability.
        batch_size: requests at once.
        level: coverage of the intervals.

    Returns:
        Estimates ``lm-eval:TASK/METRIC``, each the harness's value ± z times the standard error that it
        states; and the harness's own record of each document. A metric without a standard error has no
        interval and is no Estimate: it is logged, and stands among the records with ``"interval": None``.

    Raises:
        MissingExtraError: lm-eval is not installed.
        ConfigError: no name, or an unknown one.
    """
    require_lm_eval()
    evaluator: Any = import_module("lm_eval.evaluator")
    hf: Any = import_module("lm_eval.models.huggingface")
    names = [name.removeprefix(PREFIX) for name in names]
    manager = _task_manager(names, include_path)
    if not names:
        raise ConfigError(f"no task is named. Give --tasks {PREFIX}NAME.")
    with evaluation_mode(model), _reachable(names):
        results = evaluator.simple_evaluate(
            hf.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
            tasks=list(names),
            task_manager=manager,
            limit=limit,
            apply_chat_template=use_chat_template,
            # None: the global random states are the training's, not ours to set. Few-shot examples have
            # a seed of their own.
            random_seed=None,
            numpy_random_seed=None,
            torch_random_seed=None,
        )
    estimates: dict[str, Estimate] = {}
    records = [
        {"task": f"{PREFIX}{task}", **sample}
        for task, samples in results["samples"].items()
        for sample in samples
    ]
    for task, figures in results["results"].items():
        n = (
            results["n-samples"]
            .get(task, {})
            .get("effective", sum(1 for r in records if r["task"] == PREFIX + task))
        )
        for metric, value, error in _figures(figures):
            name = f"{PREFIX}{task}/{metric}"
            if error is None:
                logger.warning(
                    "%s = %s has no standard error and so no interval; it is kept as a record", name, value
                )
                records.append(
                    {"task": f"{PREFIX}{task}", "metric": metric, "value": value, "interval": None}
                )
            else:
                estimates[name] = stats.normal_interval(
                    value, error, level, n=n, unit=metric, source="lm-eval"
                )
    return estimates, records


def _figures(figures: dict[str, Any]) -> list[tuple[str, float, float | None]]:
    """(metric, value, standard error) from the harness's ``{"acc,none": …, "acc_stderr,none": …}``."""
    found = []
    for key, value in figures.items():
        metric, comma, pipeline = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = figures.get(f"{metric}_stderr,{pipeline}")
        shown = metric if pipeline == "none" else f"{metric},{pipeline}"
        found.append((shown, float(value), float(error) if isinstance(error, int | float) else None))
    return found


def _unknown(name: str, known: Sequence[str], include_path: str | Path | None) -> str:
    """The near matches of a name, without the harness's whole list of thousands."""
    message, _, _ = unknown_name("lm-eval task", name, known).partition(" Known:")
    where = f"the harness and in {str(include_path)!r}" if include_path else "the harness"
    return f"{message} There are {len(known)} in {where}; `lm-eval ls tasks` lists them."
