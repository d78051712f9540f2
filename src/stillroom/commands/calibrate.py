"""`stillroom calibrate`: make a teacher more or less distillable, and keep its skill.

The walk, in this order. Without weights: run folder, reward and arguments are looked at, prompts chosen;
`--dry-run` ends here. With weights: policy and proxies are loaded, prompts rendered, the original measured on
held-out prompts, and what could not be calibrated is refused. Only then is the run folder written. In it:
training under the guard; the last good weights as an adapter with a card; figures on prompts that neither the
training nor the guard has seen.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, cast

import yaml
from safetensors.torch import load_file, save_file
from transformers import TrainerState, set_seed

from stillroom import stats
from stillroom.calibration.anchor import Anchor
from stillroom.calibration.guards import GuardCallback
from stillroom.calibration.judge import Judge
from stillroom.calibration.monitors import check_thresholds
from stillroom.calibration.prompts import ask, select
from stillroom.calibration.rewards import reward_row
from stillroom.commands.calibration_card import write_card
from stillroom.commands.calibration_checks import (
    floor_points,
    refuse_adapter,
    refuse_what_cannot_be_calibrated,
)
from stillroom.commands.calibration_parts import (
    HeldoutSets,
    influences,
    load_proxy,
    load_trained_weights,
    prompts_digest,
    trained_weights,
    weights_digest,
)
from stillroom.commands.checks import refuse_output_inside_models
from stillroom.commands.display import RunCallback, figures_table, make_console
from stillroom.config import CalibrateConfig, Options
from stillroom.config.calibration import preset_values
from stillroom.data.rendering import end_ids
from stillroom.errors import ConfigError
from stillroom.models import loading, lora
from stillroom.records import disk_errors, plain
from stillroom.runs import Run
from stillroom.training.checkpoints import CompleteCheckpoints, last_complete_checkpoint
from stillroom.types import Estimate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from stillroom.calibration.guards import GuardReading

CHECKPOINTS = "checkpoints"
GOOD = "good"
"""Folder of the trained weights at measurements above the floor, by step; what no checkpoint needs is removed."""


def calibrate(config: CalibrateConfig, options: Options) -> dict[str, Estimate]:
    """Run one calibration and return its figures; the teacher is in the run folder.

    Raises:
        StillroomError: one of its leaves, before any work is lost.
    """
    proxies = (config.proxy.path, *config.more_proxies)
    models = {"teacher": config.teacher.path} | {f"proxy {i}": path for i, path in enumerate(proxies)}
    refuse_output_inside_models(config.output_dir, models)
    set_by_preset = preset_values(config)
    run = Run.prepare(config.output_dir, command="calibrate", config=config, resume=options.resume)
    console = make_console(quiet=options.quiet or not run.is_writer)
    if run.is_finished:
        console.print(f"{run.path} is finished; its figures are in results.json")
        return run.results()
    if set_by_preset:
        console.print(f"preset {config.preset} sets {set_by_preset}")
    reward_row(config.reward.name)
    check_thresholds(config.guard.thresholds)
    # Imported here: it costs seconds, and what is refused above needs none of it.
    from stillroom.calibration import grpo

    args = grpo.arguments(
        config,
        run.path / CHECKPOINTS,
        world_size=_world_size(),
        show_bar=not options.quiet and sys.stderr.isatty(),
    )
    chosen = select(config)
    tokenizer = loading.load_tokenizer(config.teacher.path, config.teacher.revision)
    if options.dry_run:
        console.print(yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True))
        console.print(
            f"would take {config.train.max_steps} steps of {config.train.prompts_per_step} prompts x "
            f"{config.train.num_generations} completions, guarded on {len(chosen.guard)} prompts and stated on "
            f"{len(chosen.stated)} others; nothing was written"
        )
        return {}

    set_seed(config.train.seed)
    refuse_adapter(config.teacher.path)
    policy = loading.load_model(
        config.teacher.path, config.teacher.dtype, config.teacher.revision, device=args.device
    )
    ends = end_ids(policy, tokenizer)
    room, positions = config.train.max_completion_length, loading.longest_input(policy)
    train, guard, stated = (
        ask(part, tokenizer, room=room, positions=positions)
        for part in (chosen.train, chosen.guard, chosen.stated)
    )
    scorers = [load_proxy(config, path, tokenizer, policy, args.device) for path in proxies]
    judge = Judge(
        [*train, *guard, *stated],
        tokenizer,
        ends,
        scorers,
        config.reward,
        group_size=config.train.num_generations,
        seed=config.train.seed,
        influences=influences(config, scorers, chosen.train),
    )
    judge.bind(policy)
    held = HeldoutSets(config, tokenizer, ends, guard, stated)
    refuse_what_cannot_be_calibrated(config, judge, held, policy)
    before = held.guard.measure(policy, Anchor(policy, policy))
    points = floor_points(config, before)
    adapter = (
        lora.lora_config(policy, config.lora.r, config.lora.lora_alpha, config.lora.target_modules)
        if (config.lora.r)
        else None
    )
    run.require_disk(_bytes_written(config, policy))
    run.begin(
        prompts=prompts_digest(train, guard, stated),
        proxies=weights_digest([scorer.model for scorer in scorers]),
        teacher=weights_digest([policy]),
        world_size=args.world_size,
    )
    good = run.path / GOOD

    def anchor_of(now: PreTrainedModel) -> Anchor:
        return Anchor(now, None if adapter else cast("PreTrainedModel", trainer.ref_model or frozen_copy()))

    @functools.cache
    def frozen_copy() -> PreTrainedModel:  # the trainer has one of its own, unless beta is 0
        spec = config.teacher
        return loading.load_teacher(spec.path, spec.dtype, spec.revision, device=args.device)

    def save_good(step: int) -> None:
        if run.is_writer:
            with disk_errors(run.path):
                good.mkdir(exist_ok=True)
                half = good / "half-written.safetensors"
                save_file(trained_weights(trainer.accelerator.unwrap_model(trainer.model)), half)
                half.replace(good / f"step-{step}.safetensors")

    def restore_good(step: int) -> None:
        trainer.accelerator.wait_for_everyone()
        kept = load_file(good / f"step-{step}.safetensors")
        load_trained_weights(trainer.accelerator.unwrap_model(trainer.model), kept)

    def forget_good(before: int) -> None:
        for file in good.glob("step-*.safetensors") if run.is_writer else ():
            if int(file.stem.removeprefix("step-")) < before:
                file.unlink()

    def measure() -> GuardReading:
        now = trainer.accelerator.unwrap_model(trainer.model)
        return held.guard.measure(now, anchor_of(now))

    watching = GuardCallback(
        every_steps=config.guard.every_steps,
        floor_points=points,
        kl_budget=config.train.kl_budget,
        on_breach=config.guard.on_breach,
        on_alarm=config.guard.on_alarm,
        thresholds=config.guard.thresholds,
        measure=measure,
        save_good=save_good,
        restore_good=restore_good,
        report=lambda figures, step: run.log({f"guard/{k}": v for k, v in figures.items()}, step=step),
        original=before,
        expects_kl=config.train.beta > 0,
        forget_good=forget_good,
    )
    trainer = grpo.build(
        policy,
        tokenizer,
        train,
        judge,
        args,
        peft_config=adapter,
        callbacks=[
            RunCallback(run, console, shown=("utility/mean", "calibration/", "kl")),
            CompleteCheckpoints(config.train.save_total_limit),
            watching,  # last: it forgets weights once a checkpoint is known to be whole
        ],
    )
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ConfigError(
            "calibration under FSDP or DeepSpeed is not supported: the guard samples on each process at its own pace, "
            "and sharded processes would wait for each other for ever. Use DDP (torchrun), with adapters if memory is "
            "short."
        )
    checkpoint = last_complete_checkpoint(run.path / CHECKPOINTS) if options.resume else None
    step = int(checkpoint.name.split("-")[1]) if checkpoint is not None else 0
    run.rewind(step)
    if checkpoint is not None:
        console.print(f"resuming after step {step}")
        watching.take_over(TrainerState.load_from_json(str(checkpoint / "trainer_state.json")))
    else:
        save_good(0)
    if watching.stop_reason:  # killed after it had stopped
        restore_good(watching.last_good_step)
    else:
        with disk_errors(run.path):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    calibrated = trainer.accelerator.unwrap_model(trainer.model)
    ended = watching.summary()
    console.print(f"stopped by {ended['stop_reason']}; good is the teacher of step {ended['last_good_step']}")
    if ended["last_good_step"] == 0:
        console.print(
            "NOTHING WAS CALIBRATED: no measurement stayed above the floor, and the teacher is the original"
        )

    console.print(f"measuring on {len(stated)} prompts that were not used before")
    figures, records = held.figures(calibrated, anchor_of(calibrated))
    figures["train/steps"] = stats.exact(float(ended["last_good_step"]), n=1, unit="steps")
    run.replace_rollouts(records)
    if run.is_writer:
        with disk_errors(run.path):
            _save(config, run, calibrated, tokenizer)
            write_card(config, run.path, figures, ended)
    run.write_results(figures, **ended)
    figures_table(console, figures)
    console.print(f"the calibrated teacher: {run.path / 'teacher'}")
    return figures


def _world_size() -> int:
    from accelerate import PartialState

    return PartialState().num_processes


def _save(
    config: CalibrateConfig, run: Run, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    folder = run.path / "teacher"
    if config.lora.r:
        # The name that the user gave, so that the folder can be moved to another machine.
        model.peft_config["default"].base_model_name_or_path = config.teacher.path  # pyright: ignore
        model.peft_config["default"].revision = config.teacher.revision  # pyright: ignore
    # No token was added, so no embedding belongs into an adapter; peft would look for the base under its name.
    options: dict[str, Any] = {"save_embedding_layers": False} if config.lora.r else {}
    model.save_pretrained(folder, **options)
    tokenizer.save_pretrained(folder)
    if config.save_merged and config.lora.r:
        merged = model.merge_and_unload()  # pyright: ignore[reportCallIssue]
        merged.save_pretrained(run.path / "merged")
        tokenizer.save_pretrained(run.path / "merged")


def _bytes_written(config: CalibrateConfig, policy: PreTrainedModel) -> int:
    """Disk that checkpoints and results may take."""
    size = 4 * loading.num_parameters(policy)
    trained = size if not config.lora.r else size // 4
    return (config.train.save_total_limit + 1) * 3 * trained + 2 * size + 20_000_000
