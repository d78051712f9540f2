"""`stillroom evaluate`: how good a model is on tasks, with intervals."""

from __future__ import annotations

from stillroom.commands.display import figures_table, make_console
from stillroom.commands.scoring import score_tasks
from stillroom.config import EvaluateConfig, Options
from stillroom.data.tasks import TASKS, load_task
from stillroom.errors import ConfigError, unknown_name
from stillroom.evaluation.lm_eval_bridge import PREFIX, evaluate_lm_eval, require_lm_eval
from stillroom.models import loading
from stillroom.runs import Run
from stillroom.types import Estimate


def evaluate(config: EvaluateConfig, options: Options) -> dict[str, Estimate]:
    """Score the model on every task and return the figures; every sample is kept in the run folder."""
    console = make_console()
    ours = [name for name in config.tasks if not name.startswith(PREFIX)]
    theirs = [name.removeprefix(PREFIX) for name in config.tasks if name.startswith(PREFIX)]
    for name in ours:
        task = load_task(name, config.data_dir)
        split = config.split or TASKS[name].test_split
        if split not in task.splits:
            raise ConfigError(unknown_name(f"split of task {name!r}", split, task.splits))
    if theirs:
        require_lm_eval()
    path = loading.resolve(config.model.path)
    if options.dry_run:
        console.print(f"would score {path} on {', '.join(config.tasks)}; nothing was written", markup=False)
        return {}
    run = Run.create(config.output_dir, command="evaluate", config=config, resume=options.resume)
    if run.is_finished:
        console.print(f"{run.path} is finished; its figures are in results.json", markup=False)
        return run.results()
    tokenizer = loading.load_tokenizer(config.model.path, config.model.revision)
    model = loading.load_model(config.model.path, config.model.dtype, config.model.revision)
    figures, records = score_tasks(
        model,
        tokenizer,
        ours,
        data_dir=config.data_dir,
        split=config.split,
        max_examples=config.max_examples,
        num_samples=config.num_samples,
        max_completion_length=config.max_completion_length,
        batch_size=config.batch_size,
        seed=config.seed,
        multiple_choice=config.multiple_choice,
    )
    if theirs:
        handed, documents = evaluate_lm_eval(
            model,
            tokenizer,
            theirs,
            include_path=config.data_dir,
            limit=config.max_examples,
            batch_size=config.batch_size,
        )
        figures |= handed
        records += documents
    run.add_rollouts(records)
    run.write_results(figures, model=path)
    figures_table(console, figures)
    console.print(f"figures and samples: {run.path}", markup=False)
    return figures
