"""`stillroom distill`: from a recipe to a student, with figures before and after.

The walk: rows and tokenizers first (seconds), so that bad data is refused before any weight is read; then
the models; then completions by the teacher, if it is to write them; figures of the start; training; figures
of the end. On resume the same walk is done again, and training goes on from the last complete checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from transformers import set_seed

from stillroom import seeds, stats
from stillroom.commands.assemble import Pair, arguments, build_trainer, bytes_written, load_pair, render
from stillroom.commands.display import RunCallback, before_and_after, make_console, show_example
from stillroom.commands.scoring import score_tasks
from stillroom.config import DistillConfig, Options
from stillroom.data.batches import TrainingRow
from stillroom.data.prepare import completed, select_rows
from stillroom.data.rendering import end_ids, render_prompt
from stillroom.errors import ConfigError, VocabularyError
from stillroom.evaluation.fidelity import heldout_divergences
from stillroom.losses import make_loss
from stillroom.models import loading
from stillroom.models.vocab import SharedVocabulary, fingerprint, shared_vocabulary
from stillroom.runs import Run, plain, read_jsonl, rollout
from stillroom.sampling.sampler import HFSampler
from stillroom.sampling.teacher import LiveTeacher
from stillroom.training.checkpoints import last_complete_checkpoint
from stillroom.types import Estimate, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from stillroom.data.rows import Row

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Folder of the run that the Trainer writes to."""


def distill(config: DistillConfig, options: Options) -> dict[str, Estimate]:
    """Run one distillation and return its figures; everything else is in the run folder.

    Raises:
        StillroomError: one of its leaves, before any work is lost.
    """
    console = make_console(quiet=options.quiet)
    _refuse_output_inside_a_model(config)
    if config.loss.name != "cross_entropy":
        loss_options: dict[str, Any] = dict(config.loss.options)
        make_loss(config.loss.name, **loss_options)  # an unknown name or option is found here
    train_rows, heldout_rows = select_rows(config.data)
    if options.dry_run:
        _show_plan(console, config, train_rows, heldout_rows)
        return {}
    run = Run.prepare(config.output_dir, command="distill", config=config, resume=options.resume)
    if run.is_finished:
        console.print(f"{run.path} is finished; its figures are in results.json", markup=False)
        return run.results()
    args = arguments(config, run.path / CHECKPOINTS, quiet=options.quiet)
    set_seed(config.train.seed)
    pair = load_pair(config)
    if config.score.heldout_kl:
        _require_shared_vocabulary(pair)
    train = render(config, pair, train_rows, by_teacher=config.data.completions == "teacher")
    heldout = render(
        config, pair, heldout_rows, by_teacher=config.data.completions == "teacher", is_heldout=True
    )
    trainer = build_trainer(pair, args, train, RunCallback(run, console))
    run.begin(free_bytes=bytes_written(config, pair.student))

    if config.data.completions == "teacher":
        if config.sampling.on_policy_fraction < 1:
            train = _by_teacher(
                config, pair, run, train, "train", config.data.num_generations, quiet=options.quiet
            )
            trainer.train_dataset = train
        # Prompts given inline have no held-out set of their own: held out are other completions of them.
        copies = -(-config.data.heldout_rows // len(heldout)) if config.data.prompts and heldout else 1
        heldout = _by_teacher(config, pair, run, heldout, "heldout", copies, quiet=options.quiet)
    console.print(
        f"teacher {loading.num_parameters(pair.teacher):,} parameters, student "
        f"{loading.num_parameters(pair.student):,}; {len(train):,} rows to train on, {len(heldout)} held out"
    )
    if run.is_writer:
        show_example(console, pair.student_tokenizer, train[0])

    of_teacher = (
        _scores(config, pair.teacher, pair.teacher_tokenizer, run, "teacher") if config.score.teacher else {}
    )
    before = _figures(config, pair, run, heldout, "before")
    checkpoint = last_complete_checkpoint(run.path / CHECKPOINTS) if options.resume else None
    step = int(checkpoint.name.split("-")[1]) if checkpoint is not None else 0
    run.rewind(step)
    if step:
        console.print(f"resuming after step {step}")
    output = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    student = trainer.accelerator.unwrap_model(trainer.model)
    if config.lora.r and not config.student.path:
        student = student.merge_and_unload()  # its base was made here and is saved nowhere else
    trained = replace(pair, student=student)
    if run.is_writer:
        trained.student.save_pretrained(run.path / "student")
        pair.student_tokenizer.save_pretrained(run.path / "student")

    after = _figures(config, trained, run, heldout, "after")
    figures = {
        f"{name}/{when}": estimate
        for when, found in (("teacher", of_teacher), ("before", before), ("after", after))
        for name, estimate in found.items()
    }
    # Of this process: a resumed run counts from where it went on.
    figures["train/seconds"] = stats.exact(output.metrics["train_runtime"], n=1, unit="s")
    figures["train/tokens_read"] = stats.exact(trainer.tokens_read, n=1, unit="tokens")
    sample = _sample(config, trained)
    run.write_results(figures, steps=output.global_step, sample=sample)
    if run.is_writer:
        before_and_after(console, before, after, of_teacher)
        if sample is not None:
            console.print(f"sample: {sample!r}", markup=False)
        console.print(f"student and figures: {run.path}", markup=False)
    return figures


def _refuse_output_inside_a_model(config: DistillConfig) -> None:
    output = Path(config.output_dir).resolve()
    for role, name in (("teacher", config.teacher.path), ("student", config.student.path)):
        folder = Path(name).resolve()
        if name and folder.is_dir() and (output == folder or folder in output.parents):
            raise ConfigError(
                f"output_dir {config.output_dir!r} lies inside the {role}'s folder {name!r}, so the run would write "
                "into a model. Give an output_dir of its own."
            )
    if config.student.path:
        loading.check_distinct(config.student.path, config.teacher.path)


def _show_plan(console: Console, config: DistillConfig, train: Sequence[Row], heldout: Sequence[Row]) -> None:
    import yaml

    console.print(yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True), markup=False)
    for role, name in (("teacher", config.teacher.path), ("student", config.student.path)):
        if name:
            loading.load_tokenizer(name)
            console.print(f"{role}: {loading.resolve(name)}", markup=False)
    console.print(f"would train on {len(train):,} rows and hold out {len(heldout)}; nothing was written")


def _by_teacher(
    config: DistillConfig,
    pair: Pair,
    run: Run,
    rendered: Sequence[TrainingRow],
    purpose: str,
    num_generations: int,
    *,
    quiet: bool,
) -> list[TrainingRow]:
    """The same prompts with completions by the teacher, written once and read back on resume."""
    if not rendered:
        return []
    stored = [r for r in read_jsonl(run.path / "rollouts.jsonl") if r.get("purpose") == purpose]
    wanted = len(rendered) * num_generations
    if len(stored) == wanted:
        rollouts = [rollout(record) for record in stored]
    else:
        sampler = HFSampler(
            pair.teacher,
            pair.teacher_tokenizer,
            batch_size=config.sampling.batch_size,
            name=config.teacher.path,
            progress=None if quiet else f"teacher writes {wanted:,} completions ({purpose})",
        )
        rollouts = sampler.sample(
            [Prompt(row.id, row.teacher_prompt_ids or row.prompt_ids) for row in rendered],
            num_generations=num_generations,
            max_completion_length=config.sampling.max_completion_length,
            temperature=config.sampling.temperature,
            seed=seeds.key(config.train.seed, "teacher completions", purpose),
        )
        run.add_rollouts(rollouts, purpose=purpose)
    truncated = sum(r.stop_reason == "length" for r in rollouts)
    logger.info("%s: %d of %d teacher completions were cut off", purpose, truncated, len(rollouts))
    return completed(rendered, rollouts, pair.student_tokenizer, pair.teacher_tokenizer, pair.student)


def _figures(
    config: DistillConfig, pair: Pair, run: Run, heldout: Sequence[TrainingRow], when: str
) -> dict[str, Estimate]:
    """Held-out divergence and task scores of the student as it is now; computed by the first worker."""
    if not run.is_writer:
        return {}
    figures: dict[str, Estimate] = {}
    if config.score.heldout_kl:
        shared = _require_shared_vocabulary(pair)
        source = LiveTeacher(
            pair.teacher, vocab_size=shared.num_shared, fingerprint=fingerprint(pair.student_tokenizer)
        )
        divergences = heldout_divergences(pair.student, source, heldout, vocab_size=shared.num_shared)
        figures |= {f"heldout/{name}": estimate for name, estimate in divergences.items()}
    return figures | _scores(config, pair.student, pair.student_tokenizer, run, when)


def _scores(
    config: DistillConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, run: Run, who: str
) -> dict[str, Estimate]:
    if not (config.score.tasks and run.is_writer):
        return {}
    scores, samples = score_tasks(
        model,
        tokenizer,
        config.score.tasks,
        data_dir=config.data.data_dir,
        max_examples=config.score.max_examples,
        num_samples=config.score.num_samples,
        max_completion_length=config.sampling.max_completion_length,
        batch_size=config.sampling.batch_size,
        seed=config.train.seed,
    )
    purpose = f"score {who}"
    if not any(r.get("purpose") == purpose for r in read_jsonl(run.path / "rollouts.jsonl")):  # as on resume
        run.add_rollouts(samples, purpose=purpose)
    return scores


def _require_shared_vocabulary(pair: Pair) -> SharedVocabulary:
    try:
        return shared_vocabulary(
            pair.student_tokenizer,
            pair.teacher_tokenizer,
            pair.student.config.vocab_size,
            pair.teacher.config.vocab_size,
        )
    except VocabularyError as error:
        raise VocabularyError(
            f"{error} In a recipe: data.completions: teacher, loss.name: cross_entropy, and score.heldout_kl: false, "
            "since a divergence between unlike vocabularies cannot be measured either."
        ) from error


def _sample(config: DistillConfig, pair: Pair) -> str | None:
    """A greedy completion by the trained student, for the reader's eye."""
    text = config.score.sample_prompt
    if text is None:
        return None
    sampler = HFSampler(
        pair.student, pair.student_tokenizer, end_ids=end_ids(pair.student, pair.student_tokenizer)
    )
    prompt = Prompt("sample", render_prompt(pair.student_tokenizer, text))
    written = sampler.sample([prompt], max_completion_length=60, temperature=0.0, seed=0)[0]
    return text + written.text
