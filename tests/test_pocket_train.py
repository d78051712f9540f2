"""Training of pocket models: batches are right, the optimizer is Muon, a killed run goes on exactly."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from stillroom.config import Options
from stillroom.errors import ConfigError, RunFolderError
from stillroom.experiments import pocket_train
from stillroom.experiments.muon import Muon, orthogonalised
from stillroom.experiments.pocket_batches import IGNORED, BatchMaker, Mix
from stillroom.experiments.pocket_config import PocketTrainConfig
from stillroom.experiments.pocket_models import ROLES, exact, new_model, row_loss
from stillroom.pocket import tokenizers
from stillroom.pocket.chains import Chains, held_out, is_faithful, style_of
from stillroom.types import Example


@pytest.fixture(scope="module", params=tokenizers.FAMILIES)
def batches(request):
    return BatchMaker(tokenizers.build(request.param), seed=4)


def _texts(batches: BatchMaker, rows) -> list[tuple[str, str]]:
    """Prompt and completion of each row, read back from ids and labels."""
    found = []
    for ids, labels in zip(*rows, strict=True):
        supervised = (labels != IGNORED).nonzero().flatten().tolist()
        assert supervised == list(range(supervised[0], supervised[-1] + 1))
        assert ids[0] == 1
        assert (ids[supervised[-1]], labels[supervised[-1]]) == (2, 2)
        assert (ids[supervised[-1] + 1 :] == 0).all()
        assert (ids == labels)[supervised].all()
        decode = batches.tokenizer.decode
        found.append(
            (decode(ids[1 : supervised[0]].tolist()), decode(ids[supervised[0] : supervised[-1]].tolist()))
        )
    return found


def test_chain_rows_are_true_walks_in_the_style_asked_for_and_never_held_out(batches):
    lengths = {1: 1.0, 3: 1.0, 4: 1.0, 6: 2.0}
    seen = set()
    for style, mix in {
        "direct": Mix(200, 0, 0, 0, 0, lengths),
        "worked": Mix(0, 200, 0, 0, 0, lengths),
        "graded": Mix(0, 0, 200, 0, 0, lengths),
    }.items():
        (rows,) = batches.batch(mix, 7)
        assert len(rows[0]) == 200
        for prompt, completion in _texts(batches, rows):
            path = prompt[1:-2]
            example = Example(prompt, prompt, "", meta={"start": int(prompt[0]), "path": path})
            assert is_faithful(example, completion)
            written = style_of(completion)
            assert written is not None
            assert {"direct": written == 0, "worked": written == len(path)}.get(
                style, 0 <= written <= len(path)
            )
            if style == "graded" and len(path) > 1:
                assert 0 < written < len(path)
            index = int(prompt[0]) * 6 ** len(path) + sum(
                "abcdef".index(d) * 6**i for i, d in enumerate(path[::-1])
            )
            assert not held_out(len(path), torch.tensor([index]).numpy())[0]
            seen.add(len(path))
    assert seen == set(lengths)


def test_a_batch_depends_on_seed_and_step_only(batches):
    mix = Mix(8, 8, 8, 8, 8, {4: 1.0, 5: 1.0})
    again = BatchMaker(batches.tokenizer, seed=4)
    batches.batch(mix, 0)
    for (a, la), (b, lb) in zip(batches.batch(mix, 3), again.batch(mix, 3), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(la, lb)
    other = BatchMaker(batches.tokenizer, seed=5).batch(mix, 3)
    assert not torch.equal(batches.batch(mix, 3)[0][0], other[0][0])


def test_measuring_rows_are_the_held_out_walks(batches):
    ids = {e.id for e in Chains(lengths=(3,)).examples("heldout")}
    prompts = {p for p, _ in _texts(batches, batches.chains_of("heldout", 3, 3, 100, seed=0))}
    assert prompts <= ids
    assert len(prompts) > 50


def test_row_loss_is_the_cross_entropy_of_completion_and_end_token_and_of_nothing_else(batches):
    model = new_model(ROLES["proxy"], len(batches.tokenizer), seed=0).double()
    for rows in batches.batch(Mix(3, 3, 0, 3, 3, {4: 1.0}), 0):
        ids, labels = rows
        logprobs = model(input_ids=ids).logits.double().log_softmax(-1)
        expected = 0.0
        for row in range(len(ids)):
            for t in range(1, ids.shape[1]):
                if labels[row, t] != IGNORED:
                    expected -= logprobs[row, t - 1, ids[row, t]].item()
        assert row_loss(model, rows).item() == pytest.approx(expected, rel=1e-9)


def test_exact_agrees_with_greedy_decoding_token_by_token():
    tokenizer = tokenizers.build("chars")
    batches = BatchMaker(tokenizer, seed=0)
    model = new_model(ROLES["proxy"], len(tokenizer), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    rows = batches.chains_of("train", 1, 1, 24, seed=0)
    for _ in range(25):
        optimizer.zero_grad()
        (row_loss(model, rows) / 24).backward()
        optimizer.step()
    right = 0
    for ids, labels in zip(*rows, strict=True):
        first = int((labels != IGNORED).nonzero()[0]) + 2
        written = ids[:first].tolist()
        while len(written) < len(ids):
            written.append(int(model(input_ids=torch.tensor([written])).logits[0, -1].argmax()))
        right += written == ids.tolist()
    assert 0 < right < 24
    assert exact(model, rows, forced=2) == pytest.approx(right / 24)


def test_orthogonalised_keeps_singular_vectors_and_levels_singular_values():
    generator = torch.Generator().manual_seed(0)
    for shape in ((3, 8, 8), (2, 6, 20), (2, 20, 6)):
        matrices = torch.randn(shape, generator=generator)
        made = orthogonalised(matrices)
        u, _, vt = torch.linalg.svd(matrices, full_matrices=False)
        in_their_basis = u.transpose(1, 2) @ made @ vt.transpose(1, 2)
        diagonal = in_their_basis.diagonal(dim1=1, dim2=2)
        assert ((diagonal > 0.3) & (diagonal < 1.3)).all()
        assert (in_their_basis - torch.diag_embed(diagonal)).abs().max() < 1e-3


def test_muon_takes_the_same_step_for_a_gradient_of_any_size():
    steps = []
    for size in (1.0, 1e-3):
        weight = torch.nn.Parameter(torch.zeros(4, 6))
        optimizer = Muon([weight], lr=0.1)
        weight.grad = size * torch.arange(24.0).reshape(4, 6).sin()
        optimizer.step()
        steps.append(weight.detach().clone())
    assert torch.allclose(steps[0], steps[1], atol=1e-4)
    assert steps[0].norm() > 0.05


@pytest.fixture
def small(monkeypatch):
    """A teacher that is done in a second."""
    role = dataclasses.replace(
        ROLES["teacher"], layers=1, width=16, heads=2, feed_forward=32, measure_every=100, settle_steps=6
    )
    monkeypatch.setitem(pocket_train.ROLES, "teacher", role)
    return role


def _config(folder, **changes) -> PocketTrainConfig:
    return PocketTrainConfig(output_dir=str(folder), longest=3, log_every=1, **changes)


class _Killed(Exception):
    pass


def test_a_run_killed_between_checkpoints_ends_with_the_same_weights_as_one_left_alone(
    tmp_path, small, monkeypatch
):
    update = pocket_train.update

    def run(folder, kill_at=None, resume=False):
        training = pocket_train._Training(_config(folder, checkpoint_minutes=1e-9))
        made = pocket_train.Run.create(folder, command="pocket train", config=training.config, resume=resume)
        if resume:
            training.load(folder)

        def counted(*args):
            step = training.state["step"]
            if step == kill_at:
                raise _Killed
            if step == 4 and training.state["phase"] == "climb":
                training.state |= {"phase": "settle", "phase_from": 4}
            return update(*args)

        monkeypatch.setattr(pocket_train, "update", counted)
        training.go(made)
        return training

    alone = run(tmp_path / "alone")
    with pytest.raises(_Killed):
        run(tmp_path / "killed", kill_at=7)
    half_written = tmp_path / "killed" / "checkpoint-99"
    half_written.mkdir()
    (half_written / "weights.safetensors").write_bytes(b"cut off")
    resumed = run(tmp_path / "killed", resume=True)
    assert resumed.state["step"] == alone.state["step"] > 9
    for name, p in alone.model.state_dict().items():
        assert torch.equal(p, resumed.model.state_dict()[name]), name
    assert not half_written.exists()


def test_training_writes_a_model_folder_that_holds_float16_weights_and_a_measured_card(
    tmp_path, small, monkeypatch
):
    monkeypatch.setattr(pocket_train, "write_card", lambda folder: {})
    folder = pocket_train.train(_config(tmp_path / "run", minutes=1e-6))
    weights = load_file(folder / "model.safetensors")
    assert {t.dtype for t in weights.values()} == {torch.float16}
    card = json.loads((folder / "card.json").read_text())
    assert card["parameters"] == sum(t.numel() for t in weights.values())
    assert (tmp_path / "run" / "config.yaml").is_file()
    steps = [line["step"] for line in pocket_train.Run.open(tmp_path / "run").metrics()]
    assert steps == list(range(1, card["steps"] + 1))


def test_a_run_folder_in_use_or_without_a_checkpoint_is_refused(tmp_path, small):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="not empty"):
        pocket_train.train(_config(folder))
    with pytest.raises(RunFolderError, match="no complete checkpoint"):
        pocket_train.train(_config(tmp_path / "other"), Options(resume=True))


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(ConfigError, match="Did you mean 'teacher'"):
        PocketTrainConfig(role="teecher")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="from 2 to 8"):
        PocketTrainConfig(longest=9)
    with pytest.raises(ConfigError, match="minutes=-1"):
        PocketTrainConfig(minutes=-1)
    with pytest.raises(ConfigError, match="log_every=0"):
        PocketTrainConfig(log_every=0)


def test_a_new_model_depends_on_the_seed_and_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    a, b, c = (new_model(ROLES["proxy"], 72, seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(a.model.embed_tokens.weight, b.model.embed_tokens.weight)
    assert not torch.equal(a.model.embed_tokens.weight, c.model.embed_tokens.weight)
