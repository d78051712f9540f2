"""The pages say what the code does: what they show runs, what they name exists, where they point something stands."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.test_layers import ORDER

from stillroom import cli, errors
from stillroom.config import DistillConfig
from stillroom.data.rows import rows_of_records
from stillroom.losses import LOSSES
from stillroom.runs import Run

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SOURCE = sorted((ROOT / "src" / "stillroom").rglob("*.py"))
COMMENT = re.compile(r"# raises (\w+): (.+)")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """Fenced code in order, as (language, code)."""
    found = re.findall(r"^```(\w+)\n(.*?)^```$", text_of(page), flags=re.DOTALL | re.MULTILINE)
    return [(language, code) for language, code in found if language in languages]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)


def in_backticks(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


def command_and_words(line: str) -> tuple[str, list[str]]:
    """``stillroom pocket train --role proxy`` as the command's name and the words behind it."""
    words = shlex.split(line, comments=True)[1:]
    name = max((c for c in cli.COMMANDS if words[: len(c.split())] == c.split()), key=len, default=None)
    assert name is not None, f"{line!r} names no command"
    return name, words[len(name.split()) :]


def keys(config: type, before: str = "") -> set[str]:
    """Dotted names of all fields of a config, nested ones included."""
    made: set[str] = set()
    for field in dataclasses.fields(config):
        made.add(before + field.name)
        if dataclasses.is_dataclass(nested := field.default_factory):
            made |= keys(nested, f"{before}{field.name}.")
    return made


def keys_of_command(name: str) -> set[str]:
    module, _, config = cli.COMMANDS[name].config.partition(":")
    return keys(getattr(__import__(module, fromlist=[config]), config))


# The README


def test_the_snippet_of_the_readme_runs_and_the_student_comes_closer(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    [(_, snippet)] = blocks(ROOT / "README.md", "python")
    names: dict[str, float] = {}
    exec(compile(snippet, "README.md", "exec"), names)
    assert 0 < names["after"] < 0.9 * names["before"]
    assert f"{names['after']:.3f} after" in capsys.readouterr().out


def test_the_readme_is_one_screen_with_a_place_for_the_table_of_the_demo() -> None:
    text = text_of(ROOT / "README.md")
    assert re.search(r"<!-- demo-table -->\n.+\n<!-- /demo-table -->", text, flags=re.DOTALL)
    outside = re.sub(r"<!-- demo-table -->.*<!-- /demo-table -->", "", text, flags=re.DOTALL)
    assert len(outside.splitlines()) <= 75


def test_the_readme_lists_every_command_and_the_program_lists_them_too(capsys) -> None:
    table = text_of(ROOT / "README.md").split("## Commands")[1].split("## Read on")[0]
    listed = re.findall(r"^\| `stillroom ([a-z ]+)` \|", table, flags=re.MULTILINE)
    assert sorted(listed) == sorted(cli.COMMANDS)
    assert cli.main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", overview, flags=re.MULTILINE) for name in listed)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_words_of_make_that_a_page_uses_are_targets(page: Path) -> None:
    makefile = text_of(ROOT / "Makefile")
    shell = "\n".join(code for _, code in blocks(page, "sh"))
    used = set(re.findall(r"^make ([a-z-]+)", shell, flags=re.MULTILINE))
    used |= {word.removeprefix("make ") for word in in_backticks(page) if re.fullmatch("make [a-z-]+", word)}
    assert all(re.search(rf"^{word}:", makefile, flags=re.MULTILINE) for word in used), used
    if page.name == "README.md":
        assert {"demo", "test"} <= used


# Links and names, on all pages


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files_and_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", prose(page)):
        if "://" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name} points to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", prose(file), flags=re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name} points to #{anchor} of {file.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_and_flags_in_backticks_exist(page: Path) -> None:
    known = keys(DistillConfig)
    rooms = {name.split(".")[0] for name in known if "." in name}
    flags = {"help", "resume", "dry-run", "version"}.union(*(map(keys_of_command, cli.COMMANDS)))
    for word in in_backticks(page):
        key = re.match(r"(?:--)?([a-z_]+)((?:\.[a-z_]+)+)(?=$|[: =])", word)
        if key and key[1] in rooms and not word.endswith(".py"):
            assert key[1] + key[2] in known or key[1] + key[2].rpartition(".")[0] in known, (
                f"{page.name}: {word}"
            )
        flag = re.match(r"--([a-z_-]+)(?=$|[ =])", word)
        if flag:
            assert flag[1] in flags or flag[1].replace("-", "_") in flags, f"{page.name}: {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_files_in_backticks_exist(page: Path) -> None:
    files = [str(p.relative_to(ROOT)) for p in (*SOURCE, *ROOT.glob("tests/*.py"), *ROOT.glob("tools/*.py"))]
    for word in in_backticks(page):
        if re.fullmatch(r"[\w/]+\.py", word) and not word.endswith("/times.py"):  # the example of add_a_task
            assert any(f"/{file}".endswith(f"/{word}") for file in files), f"{page.name}: {word}"


# Quickstart


def written(folder: Path, page: Path) -> None:
    """Put the page's recipes into a folder, under the names that their first lines give."""
    for _, code in blocks(page, "yaml"):
        (folder / code.splitlines()[0].removeprefix("# ")).write_text(code, encoding="utf-8")


def test_the_shell_lines_of_the_quickstart_parse(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, DOCS / "quickstart.md")
    code = "".join(code for _, code in blocks(DOCS / "quickstart.md", "sh")).replace("\\\n", " ")
    lines = [line[line.find("stillroom") :] for line in code.splitlines() if "stillroom" in line]
    commands = [command_and_words(line) for line in lines if "--help" not in line]
    configs = {(name, cli.parse(name, words)[0].output_dir) for name, words in commands}
    assert {("distill", "runs/first"), ("distill", "runs/mine"), ("evaluate", "runs/scores")} <= configs


def test_the_row_layouts_of_the_quickstart_are_the_ones_that_are_read() -> None:
    [(_, code)] = blocks(DOCS / "quickstart.md", "json")
    rows = [rows_of_records([("here", json.loads(line))], "quickstart")[0] for line in code.splitlines()]
    assert [(row.prompt is None, row.completion is None, row.messages is None) for row in rows] == [
        (False, False, True),
        (False, True, True),
        (True, True, False),
    ]


def test_the_python_of_the_quickstart_runs_and_leaves_the_folder_that_the_page_describes(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    [(_, snippet)] = blocks(DOCS / "quickstart.md", "python")
    exec(compile(snippet, "quickstart.md", "exec"), {})
    assert "nats/token" in capsys.readouterr().out
    page = text_of(DOCS / "quickstart.md")
    section = page[page.index("## The run folder") : page.index("## Stop and go on")]
    described = re.findall(r"^\| `([\w./]+)` \|", section, flags=re.MULTILINE)
    made = [p.name + "/" * p.is_dir() for p in Path("runs/python").iterdir()]
    assert sorted(described) == sorted(made)
    run = Run.open("runs/python")
    logged = {key for line in run.metrics() for key in line}
    source = "".join(map(text_of, SOURCE))
    for name in re.findall(r"`((?:loss|train|rollout)/\w+)`", section):
        assert name in logged or f'"{name}"' in source, name
    assert "heldout/forward_kl_nats/before" in run.results()


def test_the_methods_of_the_quickstart_are_accepted() -> None:
    page = text_of(DOCS / "quickstart.md")
    rows = re.findall(r"^\| .*\| (\S+) \| (\S+|between 0 and 1) \| `(\w+)` \|$", page, flags=re.MULTILINE)
    assert len(rows) == 6
    for who, fraction, loss in rows:
        assert loss in LOSSES
        words = ["--teacher.path", "a", "--student.path", "b", "--data.path", "c", "--loss.name", loss]
        words += ["--sampling.on_policy_fraction", "0.5" if " " in fraction else fraction]
        words += ["--data.completions", who.strip("`")] if "`" in who else []
        assert cli.parse("distill", words)[0].loss.name == loss


@pytest.mark.parametrize("recipe", sorted(ROOT.glob("recipes/*.yaml")), ids=lambda recipe: recipe.name)
def test_every_recipe_parses_and_says_how_to_run_it(recipe: Path) -> None:
    [command] = set(re.findall(rf"stillroom (\w+) recipes/{recipe.name}", text_of(recipe)))
    config, _ = cli.parse(command, [str(recipe)])
    assert config.output_dir == f"runs/{recipe.stem}"


# Concepts


def test_the_concepts_have_a_paragraph_for_every_room() -> None:
    text = text_of(DOCS / "concepts.md")
    paragraphs = [p for p in text.split("\n\n") if p.startswith("**")]
    cellar = {"errors", "types", "seeds", "stats", "runs"}
    for room in {path.relative_to(ROOT / "src" / "stillroom").parts[0] for path in SOURCE}:
        if room.startswith("__"):
            continue
        named = f"`{room}`" if room.endswith(".py") else f"`{room}/`"
        where = "**Cellar**" if room.removesuffix(".py") in cellar else "**"
        assert any(p.startswith(where) and named in p for p in paragraphs), named


def test_the_plan_of_the_concepts_has_the_rooms_in_the_order_that_is_enforced() -> None:
    [(_, plan)] = blocks(DOCS / "concepts.md", "text")
    drawn = re.findall(r"[a-z]+", plan.splitlines()[0])
    built = {path.relative_to(ROOT / "src" / "stillroom").parts[0].removesuffix(".py") for path in SOURCE}
    assert drawn == [room for rooms in ORDER for room in rooms if room in built]


def test_the_purposes_of_the_concepts_are_those_of_the_code() -> None:
    text = text_of(DOCS / "concepts.md")
    table = text[text.index("| purpose |") : text.index("A token is sampled")]
    purposes = re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE)
    constants = {
        node.value
        for path in SOURCE
        for node in ast.walk(ast.parse(text_of(path)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert len(purposes) == 8
    assert set(purposes) <= constants


# Papers


def test_every_reference_of_the_code_stands_on_the_page_of_papers() -> None:
    page = text_of(DOCS / "papers.md")
    cited = {c for path in SOURCE for c in re.findall(r"arXiv:\d+\.\d+|doi:10\.[^\s.,]+", text_of(path))}
    assert len(cited) > 20
    assert {c for c in cited if c not in page} == set()


# Errors: the examples run one after the other in one folder, as the page says


def shown(code: str) -> Iterator[tuple[str, str]]:
    """Commands of a console block, each with the output that the page shows for it."""
    for part in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output.strip()


def matches(expected: str, output: str) -> bool:
    """Whether the output is what is shown, line breaks apart; … stands for anything."""
    pattern = ".*?".join(re.escape(" ".join(part.split())) for part in expected.split("…"))
    return re.search(re.sub(r"(\\ )+", r"\\s+", pattern), " ".join(output.split())) is not None


def run_console(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    if not command.startswith("stillroom "):
        done = subprocess.run(["bash", "-c", command], check=True, capture_output=True, text=True)
        return 0, done.stdout
    capsys.readouterr()
    code = cli.main(shlex.split(command)[1:])
    out, err = capsys.readouterr()
    return code, err if code else out


def test_the_examples_of_the_errors_page_run_and_raise_what_they_say(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for absent in ("lm_eval", "math_verify"):
        monkeypatch.setitem(sys.modules, absent, None)  # as on a machine without these extras
    page = DOCS / "errors.md"
    written(tmp_path, page)
    raised = set()
    for language, code in blocks(page, "console", "python"):
        if language == "python":
            said = COMMENT.match(code)
            if said is None:
                exec(compile(code, page.name, "exec"), {})
                continue
            with pytest.raises(errors.StillroomError) as caught:
                exec(compile(code, page.name, "exec"), {})
            assert type(caught.value).__name__ == said[1]
            assert said[2] in " ".join(str(caught.value).split())
            raised.add(said[1])
            continue
        for command, expected in shown(code):
            status, output = run_console(command, capsys)
            name = re.match(r"stillroom: (\w+):", expected)
            assert status == (2 if name else 0), f"{command}\n{output}"
            assert matches(expected, output), f"{command}\nshown: {expected}\nprinted: {output}"
            raised |= {name[1]} if name else set()
    classes = {
        c.__name__: c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)
    }
    assert raised == set(classes)
    headings = re.findall(r"^## (\w+)$", text_of(page), flags=re.MULTILINE)
    assert headings == [name for name in classes if name != "StillroomError"] + ["StillroomError"]
    for name, parent in re.findall(r"^\| \[(\w+)\]\(#\w+\) \| `(\w+)` \|", text_of(page), flags=re.MULTILINE):
        assert issubclass(classes[name], getattr(builtins, parent)), name


def test_the_matcher_of_shown_output_sees_a_difference() -> None:
    assert matches("stillroom: ConfigError: a=1 … Use b.", "stillroom: ConfigError: a=1 is\nwrong. Use b.")
    assert not matches("stillroom: ConfigError: a=1 … Use c.", "stillroom: ConfigError: a=1 is wrong. Use b.")
    assert not matches("a=2", "a=1")


def test_the_recipes_in_the_pages_are_whole(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for page in (DOCS / "quickstart.md", DOCS / "errors.md"):
        written(tmp_path, page)
    assert {yaml.safe_load(text_of(p))["student"]["path"] for p in tmp_path.glob("*.yaml")} == {
        "pocket:chars-student"
    }
    assert all(cli.parse("distill", [str(p)]) for p in tmp_path.glob("*.yaml"))
