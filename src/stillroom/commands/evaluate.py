"""`stillroom evaluate`: how good a model is on tasks, with intervals."""

from __future__ import annotations

import torch

from stillroom.commands import scoring
from stillroom.commands.checks import refuse_output_inside_models
from stillroom.commands.display import figures_table, make_console
from stillroom.config import EvaluateConfig, Options
from stillroom.evaluation.lm_eval_bridge import PREFIX, evaluate_lm_eval, require_lm_eval
from stillroom.models import loading
from stillroom.runs import Run
from stillroom.types import Estimate


def evaluate(config: EvaluateConfig, options: Options) -> dict[str, Estimate]:
    """Score the model on every task and return the figures; every sample is kept in the run folder.

    Raises:
        StillroomError: one of its leaves, before anything is written.
    """
    refuse_output_inside_models(config.output_dir, {"model": config.model.path})
    run = Run.prepare(config.output_dir, command="evaluate", config=config, resume=options.resume)
    console = make_console(quiet=options.quiet or not run.is_writer)
    if run.is_finished:
        console.print(f"{run.path} is finished; its figures are in results.json")
        return run.results()
    theirs = [name.removeprefix(PREFIX) for name in config.tasks if name.startswith(PREFIX)]
    if theirs:
        require_lm_eval(theirs, config.data_dir)
    ours = scoring.select(
        [name for name in config.tasks if not name.startswith(PREFIX)],
        data_dir=config.data_dir,
        split=config.split,
        max_examples=config.max_examples,
        seed=config.seed,
        multiple_choice=config.multiple_choice,
    )
    path = loading.resolve(config.model.path)
    tokenizer = loading.load_tokenizer(config.model.path, config.model.revision)
    if options.dry_run:
        console.print(f"would score {path} on {', '.join(config.tasks)}; nothing was written")
        return {}
    model = loading.load_model(
        config.model.path,
        config.model.dtype,
        config.model.revision,
        device=torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None,
    )
    max_completion_length = config.max_completion_length or scoring.default_length(ours, model, tokenizer)
    scoring.check_prompts(ours, model, tokenizer, max_completion_length)
    run.begin()
    if any(not one.by_likelihood for one in ours):
        console.print(f"completions of up to {max_completion_length} tokens")
    figures, records = scoring.score(
        ours,
        model,
        tokenizer,
        num_samples=config.num_samples,
        max_completion_length=max_completion_length,
        batch_size=config.batch_size,
        seed=config.seed,
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
    run.replace_rollouts(records)  # a run that was killed while it wrote may have left some
    run.write_results(figures, model=path)
    figures_table(console, figures)
    console.print(f"figures and samples: {run.path}")
    return figures
