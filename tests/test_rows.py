"""Training rows: read strictly, named by content, never cut."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import pytest

from stillroom.data.rows import LAYOUTS, Row, fit, load_rows
from stillroom.errors import DataError
from stillroom.types import Example

USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


# --- layouts ----------------------------------------------------------------------------------------


def test_the_three_layouts_are_read(tmp_path):
    [row] = load_rows(jsonl(tmp_path / "a.jsonl", {"messages": [USER, ASSISTANT]}))
    assert (row.messages, row.prompt, row.completion) == ((USER, ASSISTANT), None, None)
    [row] = load_rows(jsonl(tmp_path / "b.jsonl", {"prompt": "1+1=", "completion": "2"}))
    assert (row.messages, row.prompt, row.completion) == (None, "1+1=", "2")
    [row] = load_rows(jsonl(tmp_path / "c.jsonl", {"prompt": [USER]}))
    assert (row.messages, row.prompt, row.completion) == (None, (USER,), None)
    [row] = load_rows(jsonl(tmp_path / "d.jsonl", {"prompt": [USER], "completion": [ASSISTANT]}))
    assert (row.prompt, row.completion) == ((USER,), "a")
    assert len(LAYOUTS) == 3


def test_all_file_formats_give_the_same_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet
    from datasets import Dataset

    rows = [
        {"id": "x", "prompt": "é 日本", "completion": "ok"},
        {"id": "y", "prompt": "p", "completion": "c"},
    ]
    expected = load_rows(jsonl(tmp_path / "rows.jsonl", *rows))
    assert [row.prompt for row in expected] == ["é 日本", "p"]
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for source in ("rows.json", "rows.parquet", "saved"):
        assert load_rows(tmp_path / source) == expected, source


def test_a_byte_order_mark_and_blank_lines_are_no_rows(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "p"})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\n  \n")
    assert [row.prompt for row in load_rows(path)] == ["p"]


def test_nulls_that_a_table_put_into_messages_are_no_part_of_them(tmp_path):
    [row] = load_rows(jsonl(tmp_path / "a.jsonl", {"messages": [{**USER, "name": None}, ASSISTANT]}))
    assert row.messages == (USER, ASSISTANT)


@dataclass(frozen=True)
class Sums:
    """A task of two examples."""

    name: str = "sums"
    version: str = "1"
    splits: tuple[str, ...] = ("train", "test")

    def examples(self, split: str):
        if split == "train":
            yield Example("sums/1", "1+1=", "2", completion="1+1=2", meta={"level": 3})
            yield Example("sums/2", [USER], "A", options=("x", "y"))

    def score(self, example: Example, completion: str) -> float:
        return float(example.answer in completion)


def test_a_task_gives_rows_with_its_answers_kept():
    first, second = load_rows(Sums(), "train")
    assert (first.id, first.prompt, first.completion) == ("sums/1", "1+1=", "1+1=2")
    assert first.extra == {"level": 3, "answer": "2", "options": ()}
    assert (second.prompt, second.completion, second.extra["options"]) == ((USER,), None, ("x", "y"))
    with pytest.raises(DataError, match=r"sums \[test\] holds no rows"):
        load_rows(Sums(), "test")


# --- columns ----------------------------------------------------------------------------------------


def test_report_77_unknown_columns_are_kept_and_named(tmp_path, caplog):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "p", "answer": "4", "teacher_id": 7})
    with caplog.at_level(logging.WARNING):
        [row] = load_rows(path)
    assert row.extra == {"answer": "4", "teacher_id": 7}
    assert "answer, teacher_id are kept but not trained on" in caplog.text


def test_report_77_missing_columns_list_found_and_expected(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"instruction": "p", "response": "c"})
    with pytest.raises(
        DataError, match=r"columns instruction, response.*messages, or prompt \+ completion, or"
    ):
        load_rows(path)
    path = jsonl(
        tmp_path / "b.jsonl", {"prompt": "p", "completion": "c"}, {"prompt": "p2", "completion": None}
    )
    with pytest.raises(
        DataError, match=r"b\.jsonl, line 2: no 'completion'.*found prompt, expected prompt \+"
    ):
        load_rows(path)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"messages": "hello"}, "must be a list of messages"),
        ({"messages": [{"role": "user"}]}, "must be a list of messages"),
        ({"messages": [{"role": "user", "content": ["text"]}]}, "must be a list of messages"),
        ({"messages": []}, "empty list"),
        ({"prompt": 7}, "must be a text or a list of messages"),
        ({"prompt": "p", "completion": 7}, "must be a text or a list of messages"),
        ({"prompt": [USER], "completion": [ASSISTANT, USER]}, "2 messages, but it is one answer"),
        ({"prompt": [USER], "completion": [USER]}, "one assistant message"),
    ],
)
def test_values_of_the_wrong_type_are_refused_with_their_line(tmp_path, row, complaint):
    path = jsonl(tmp_path / "a.jsonl", row)
    with pytest.raises(DataError, match=rf"a\.jsonl, line 1: .*{complaint}"):
        load_rows(path)


# --- ids --------------------------------------------------------------------------------------------


def test_ids_are_hashes_of_the_content_and_survive_reordering(tmp_path):
    rows = [{"prompt": f"p{i}", "completion": "c"} for i in range(5)]
    forward = load_rows(jsonl(tmp_path / "a.jsonl", *rows))
    backward = load_rows(jsonl(tmp_path / "b.jsonl", *reversed(rows)))
    assert {r.id: r.prompt for r in forward} == {r.id: r.prompt for r in backward}
    assert len({r.id for r in forward}) == 5
    [other] = load_rows(jsonl(tmp_path / "c.jsonl", {"prompt": "p0", "completion": "d"}))
    assert other.id not in {r.id for r in forward}


def test_equal_rows_are_all_kept_under_different_ids(tmp_path):
    first, second, third = load_rows(jsonl(tmp_path / "a.jsonl", *[{"prompt": "p"}] * 3))
    assert (second.id, third.id) == (f"{first.id}-2", f"{first.id}-3")


def test_duplicate_ids_are_refused(tmp_path):
    rows = [{"id": i, "prompt": f"p{n}"} for n, i in enumerate([1, 2, 1, 3, 2])]
    with pytest.raises(DataError, match=r"2 ids occur more than once \(first: '1', '2'\)"):
        load_rows(jsonl(tmp_path / "a.jsonl", *rows))


# --- damaged files ----------------------------------------------------------------------------------


def test_bytes_that_are_not_utf8_are_refused_with_their_line(tmp_path):
    good = json.dumps({"prompt": "p"}).encode()
    (tmp_path / "a.jsonl").write_bytes(good + b"\n" + b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: byte 0xe9 is not UTF-8"):
        load_rows(tmp_path / "a.jsonl")
    (tmp_path / "b.json").write_bytes(b'[\n{"prompt": "p"},\n{"prompt": "caf\xe9"}]')
    with pytest.raises(DataError, match=r"b\.json, line 3: byte 0xe9 is not UTF-8"):
        load_rows(tmp_path / "b.json")


def test_lines_that_are_not_json_objects_are_refused_with_their_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "p"}\n{"prompt": "cut off')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: not valid JSON"):
        load_rows(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text('{"prompt": "p"}\n["p"]\n')
    with pytest.raises(DataError, match=r"b\.jsonl, line 2: a list, but each row must be an object"):
        load_rows(tmp_path / "b.jsonl")
    (tmp_path / "c.json").write_text('[\n{"prompt": "p"},\n{]')
    with pytest.raises(DataError, match=r"c\.json, line 3: not valid JSON"):
        load_rows(tmp_path / "c.json")
    (tmp_path / "d.json").write_text('{"data": []}')
    with pytest.raises(DataError, match="JSON dict, but rows are read from a list"):
        load_rows(tmp_path / "d.json")
    (tmp_path / "e.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        load_rows(tmp_path / "e.parquet")


def test_empty_data_is_refused(tmp_path):
    for name, text in (("a.jsonl", ""), ("b.jsonl", "\n\n"), ("c.json", "[]")):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match="holds no rows"):
            load_rows(tmp_path / name)


def test_missing_files_and_unknown_formats_name_what_is_there(tmp_path):
    jsonl(tmp_path / "train.jsonl", {"prompt": "p"})
    with pytest.raises(DataError, match=r"Did you mean 'train\.jsonl'"):
        load_rows(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match="does not exist"):
        load_rows(tmp_path / "nowhere" / "train.jsonl")
    (tmp_path / "rows.csv").write_text("prompt\np\n")
    with pytest.raises(DataError, match=r"unknown data format '\.csv'"):
        load_rows(tmp_path / "rows.csv")
    with pytest.raises(DataError, match="no file here and cannot be loaded as a dataset"):
        load_rows("nobody/no-such-dataset")


# --- lengths ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    id: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]


def sample(name: str, prompt: int, completion: int) -> Sample:
    return Sample(name, (1,) * prompt, (2,) * completion)


def test_report_65_a_prompt_that_leaves_no_room_is_refused_with_row_and_limit():
    rows = [sample("a", 3, 3), sample("long", 10, 3), sample("b", 2, 2), sample("c", 5, 3)]
    with pytest.raises(
        DataError, match=r"1 of 4 rows.*max_length=8.*'long', its prompt of 10 tokens leaves no"
    ):
        fit(rows, 8)


def test_report_65_dropped_rows_are_counted_named_and_whole(caplog):
    rows = [sample("a", 3, 3), sample("long", 10, 3), sample("b", 2, 2), sample("tail", 5, 4)]
    with caplog.at_level(logging.WARNING):
        kept, dropped = fit(rows, 8, on_overlong="drop")
    assert kept == [rows[0], rows[2]]
    assert dropped == ["long", "tail"]
    assert "2 of 4 rows" in caplog.text
    assert "long, tail" in caplog.text


def test_report_65_data_with_only_such_rows_stops_the_run():
    with pytest.raises(DataError, match="none would be left"):
        fit([sample("a", 10, 3), sample("b", 9, 1)], 8, on_overlong="drop")


def test_report_65_a_prompt_without_completion_must_leave_room_for_one():
    assert fit([sample("a", 7, 0)], 8) == ([sample("a", 7, 0)], [])
    with pytest.raises(DataError, match="its prompt of 8 tokens leaves no room"):
        fit([sample("a", 8, 0)], 8)
    with pytest.raises(DataError, match="its prompt of 7 tokens leaves no room"):
        fit([sample("a", 7, 0)], 8, room=2)


def test_a_completion_that_is_too_long_is_told_apart_from_a_prompt_that_is():
    with pytest.raises(DataError, match="'a', 3 prompt and 6 completion tokens"):
        fit([sample("a", 3, 6), sample("b", 1, 1)], 8)


def test_rows_are_plain_values():
    assert Row("a", "p") == Row("a", "p", None, None, {})
