"""`stillroom distill`: from a recipe to a student, with figures before and after.

The walk, in this order. Without weights: the run folder is looked at, the loss and the Trainer's arguments
are checked, rows and scored examples are selected, tokenizers read; `--dry-run` ends here. With weights:
both models are loaded, vocabularies compared, rows rendered, room for every completion and on the disk
checked, the trainer built. Only then is the run folder written. In it: completions by the teacher, if it is
to write them; figures of the start; training; figures of the end. On resume the same walk is done again;
what the teacher wrote is read back, and training goes on from the last complete checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import yaml
from rich.console import Console
from transformers import set_seed

from stillroom import stats
from stillroom.commands import scoring
from stillroom.commands.assemble import (
    Pair,
    Tokenizers,
    arguments,
    build_trainer,
    bytes_written,
    digest,
    load_pair,
    prompts_of,
    render,
)
from stillroom.commands.checks import check_loss, check_models, require_shared_vocabulary
from stillroom.commands.display import RunCallback, before_and_after, make_console, show_example
from stillroom.commands.writing import by_teacher, sample, sample_prompt
from stillroom.config import DistillConfig, Options
from stillroom.data.batches import TrainingRow
from stillroom.data.prepare import select_rows
from stillroom.evaluation.fidelity import heldout_divergences
from stillroom.models import loading
from stillroom.models.vocab import fingerprint
from stillroom.records import disk_errors, plain, read_jsonl
from stillroom.runs import Run
from stillroom.sampling.teacher import LiveTeacher
from stillroom.training.checkpoints import last_complete_checkpoint
from stillroom.training.preflight import updates_per_epoch
from stillroom.types import Estimate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHECKPOINTS = "checkpoints"
"""Folder of the run that the Trainer writes to."""


def distill(config: DistillConfig, options: Options) -> dict[str, Estimate]:
    """Run one distillation and return its figures; everything else is in the run folder.

    Raises:
        StillroomError: one of its leaves, before any work is lost.
    """
    check_models(config)
    run = Run.prepare(config.output_dir, command="distill", config=config, resume=options.resume)
    console = make_console(quiet=options.quiet or not run.is_writer)
    if run.is_finished:
        console.print(f"{run.path} is finished; its figures are in results.json")
        return run.results()
    check_loss(config.loss)
    args = arguments(config, run.path / CHECKPOINTS, quiet=options.quiet)
    train_rows, heldout_rows = select_rows(config.data)
    scored = scoring.select(
        config.score.tasks,
        data_dir=config.data.data_dir,
        max_examples=config.score.max_examples,
        seed=config.train.seed,
    )
    tokenizers = Tokenizers.load(config)
    to_continue = sample_prompt(config, tokenizers.student)
    if options.dry_run:
        _show_plan(console, config, len(train_rows), len(heldout_rows))
        return {}

    set_seed(config.train.seed)
    pair = load_pair(config, tokenizers, args.device)
    if config.score.heldout_kl:
        require_shared_vocabulary(pair)
    train, heldout = render(config, pair, train_rows), render(config, pair, heldout_rows, is_heldout=True)
    updates_per_epoch(len(train) * config.data.num_generations, args)  # refused if there is not even one
    limit = config.sampling.max_completion_length
    scoring.check_prompts(scored, pair.student, pair.student_tokenizer, limit)
    if config.score.teacher:
        scoring.check_prompts(scored, pair.teacher, pair.teacher_tokenizer, limit)
    run.require_disk(bytes_written(config, pair.student))
    trainer = build_trainer(pair, args, train, RunCallback(run, console))
    run.begin(rows=digest(train, heldout), world_size=args.world_size)

    if config.data.completions == "teacher":
        if config.sampling.on_policy_fraction < 1:
            train = by_teacher(config, pair, run, console, train, "train", config.data.num_generations)
            trainer.train_dataset = train
        # Prompts given inline have no held-out set of their own: held out are other completions of them.
        copies = -(-config.data.heldout_rows // len(heldout)) if config.data.prompts and heldout else 1
        heldout = by_teacher(config, pair, run, console, heldout, "heldout", copies)
    console.print(
        f"teacher {loading.num_parameters(pair.teacher):,} parameters, student "
        f"{loading.num_parameters(pair.student):,}; {len(train):,} rows to train on, {len(heldout)} held out"
    )
    show_example(console, pair.student_tokenizer, train[0])

    score = _Scorer(config, scored, run)
    of_teacher = score(pair.teacher, pair.teacher_tokenizer, "teacher") if config.score.teacher else {}
    asked = prompts_of(train_rows)
    before: dict[str, Estimate] = {}
    if config.score.start:
        before = _heldout(config, pair, run, heldout) | score(
            pair.student, pair.student_tokenizer, "before", asked
        )
    found_in_training = _show_overlap(console, before)

    checkpoint = last_complete_checkpoint(run.path / CHECKPOINTS) if options.resume else None
    step = int(checkpoint.name.split("-")[1]) if checkpoint is not None else 0
    run.rewind(step)
    if step:
        console.print(f"resuming after step {step}")
    with disk_errors(run.path):
        output = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    student = trainer.accelerator.unwrap_model(trainer.model)
    if config.lora.r and not config.student.path:
        student = student.merge_and_unload()  # its base was made here and is saved nowhere else
    trained = replace(pair, student=student)
    if run.is_writer:
        with disk_errors(run.path):
            trained.student.save_pretrained(run.path / "student")
            pair.student_tokenizer.save_pretrained(run.path / "student")

    after = _heldout(config, trained, run, heldout)
    after |= score(student, pair.student_tokenizer, "after", None if config.score.start else asked)
    found_in_training |= _show_overlap(console, after)
    figures = found_in_training | {
        f"{name}/{when}": estimate
        for when, found in (("teacher", of_teacher), ("before", before), ("after", after))
        for name, estimate in found.items()
    }
    # Of this process: a resumed run counts from where it went on, which is noted beside them.
    figures["train/seconds"] = stats.exact(output.metrics["train_runtime"], n=1, unit="s")
    figures["train/tokens_read"] = stats.exact(trainer.tokens_read, n=1, unit="tokens")
    shown = sample(console, config, trained, to_continue) if to_continue and run.is_writer else None
    run.write_results(figures, steps=output.global_step, resumed_after_step=step, sample=shown)
    before_and_after(console, before, after, of_teacher)
    if shown is not None:
        console.print(f"sample: {shown!r}")
    console.print(f"student and figures: {run.path}")
    return figures


def _show_plan(console: Console, config: DistillConfig, num_train: int, num_heldout: int) -> None:
    console.print(yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True))
    for role, name in (("teacher", config.teacher.path), ("student", config.student.path)):
        if name:
            console.print(f"{role}: {loading.resolve(name)}")
    console.print(f"would train on {num_train:,} rows and hold out {num_heldout}; nothing was written")


def _show_overlap(console: Console, figures: dict[str, Estimate]) -> dict[str, Estimate]:
    """Take the overlap out of a student's figures; one line for each task of which items stand among the prompts."""
    found = {name: figures.pop(name) for name in list(figures) if "/overlap_" in name}
    for name, loose in found.items():
        task, _, level = name.rpartition("/overlap_")
        if level == "numbers_masked" and loose.value > 0:
            console.print(
                f"{task}: {loose.value:.1%} of {loose.n} items stand among the training prompts (numbers masked; word "
                f"for word {found[f'{task}/overlap_exact'].value:.1%})"
            )
    return found


def _heldout(config: DistillConfig, pair: Pair, run: Run, rows: Sequence[TrainingRow]) -> dict[str, Estimate]:
    """Divergence from the teacher of the student as it is now; measured by the first worker."""
    if not (config.score.heldout_kl and run.is_writer):
        return {}
    shared = require_shared_vocabulary(pair)
    source = LiveTeacher(
        pair.teacher, vocab_size=shared.num_shared, fingerprint=fingerprint(pair.student_tokenizer)
    )
    figures = heldout_divergences(pair.student, source, rows, vocab_size=shared.num_shared)
    return {f"heldout/{name}": estimate for name, estimate in figures.items()}


class _Scorer:
    """Scores of a model on the chosen tasks; by the first worker, which keeps the samples."""

    def __init__(self, config: DistillConfig, chosen: Sequence[scoring.Chosen], run: Run) -> None:
        self.config, self.chosen, self.run = config, chosen, run

    def __call__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        who: str,
        train_prompts: Sequence[str] | None = None,
    ) -> dict[str, Estimate]:
        if not (self.chosen and self.run.is_writer):
            return {}
        figures, samples = scoring.score(
            self.chosen,
            model,
            tokenizer,
            num_samples=self.config.score.num_samples,
            max_completion_length=self.config.sampling.max_completion_length,
            batch_size=self.config.sampling.batch_size,
            seed=self.config.train.seed,
            train_prompts=train_prompts,
        )
        purpose = f"score {who}"
        written = read_jsonl(self.run.path / "rollouts.jsonl")
        if not any(r.get("purpose") == purpose for r in written):  # as on resume
            self.run.add_rollouts(samples, purpose=purpose)
        return figures
