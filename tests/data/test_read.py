"""Every kind of file, and the ways in which they are broken."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.data.read import read_file
from trimtab.errors import RequestError

ROWS = [
    {"instruction": "Say hi.", "output": "hi"},
    {"instruction": "Ünïcode\u2028line", "output": "two\nlines"},
]


def values(path: Path) -> list[dict[str, object]]:
    return [row.values for row in read_file(path)]


def put(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return path


def test_json_array(tmp_path: Path) -> None:
    path = put(tmp_path, "a.json", json.dumps(ROWS))
    assert values(path) == ROWS
    assert read_file(path)[1].where == f"{path}, row 2"


def test_json_object_with_one_list_inside(tmp_path: Path) -> None:
    assert values(put(tmp_path, "a.json", json.dumps({"version": 1, "data": ROWS}))) == ROWS


def test_json_object_with_two_lists_is_not_guessed_at(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"several lists inside \(train, test\)"):
        read_file(put(tmp_path, "a.json", json.dumps({"train": ROWS, "test": ROWS})))


def test_a_single_row_with_a_list_in_it_is_a_row(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    assert values(put(tmp_path, "a.json", json.dumps(row))) == [row]


def test_jsonl_keeps_line_separators_inside_texts(tmp_path: Path) -> None:
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    assert values(put(tmp_path, "a.jsonl", text)) == ROWS


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_bom_crlf_and_empty_lines(tmp_path: Path, name: str) -> None:
    text = "\ufeff" + "\r\n\r\n".join(json.dumps(row) for row in ROWS) + "\r\n"
    rows = read_file(put(tmp_path, name, text))
    assert [row.values for row in rows] == ROWS
    assert [row.number for row in rows] == [1, 3]


def test_utf16_with_its_mark(tmp_path: Path) -> None:
    assert values(put(tmp_path, "a.json", json.dumps(ROWS, ensure_ascii=False).encode("utf-16"))) == ROWS


def test_latin1_names_the_line(tmp_path: Path) -> None:
    raw = b'{"text": "fine"}\n{"text": "caf\xe9"}\n'
    with pytest.raises(RequestError, match=r"a\.jsonl, line 2: byte 0xe9 is not UTF-8"):
        read_file(put(tmp_path, "a.jsonl", raw))


def test_broken_line_names_file_line_and_column(tmp_path: Path) -> None:
    text = '{"text": "a"}\n{"text": "b"}\n{"text": oops}\n'
    with pytest.raises(
        RequestError, match=r"a\.jsonl, line 3: not valid JSON \(Expecting value, column 10\)"
    ):
        read_file(put(tmp_path, "a.jsonl", text))


def test_broken_json_array_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"a\.json, line 3: not valid JSON"):
        read_file(put(tmp_path, "a.json", '[\n{"text": "a"},\n{"text" "b"}\n]'))


def test_a_row_that_is_no_object(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"line 2: a list"):
        read_file(put(tmp_path, "a.jsonl", '{"text": "a"}\n["b"]\n'))
    with pytest.raises(RequestError, match=r"row 2: a text"):
        read_file(put(tmp_path, "a.json", '[{"text": "a"}, "b"]'))


def test_parquet(tmp_path: Path) -> None:
    rows = [{**row, "messages": [{"role": "user", "content": "x"}]} for row in ROWS]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert values(tmp_path / "a.parquet") == rows


def test_broken_parquet(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"a\.parquet: not a readable Parquet file"):
        read_file(put(tmp_path, "a.parquet", b"PAR1 no"))


def test_csv_with_bom_crlf_and_quoted_lines(tmp_path: Path) -> None:
    text = '\ufeffinstruction,output\r\n"Say ""hi"", please.","one\r\ntwo"\r\nb,\r\n'
    rows = read_file(put(tmp_path, "a.csv", text))
    assert [row.values for row in rows] == [
        {"instruction": 'Say "hi", please.', "output": "one\r\ntwo"},
        {"instruction": "b", "output": ""},
    ]
    assert [row.number for row in rows] == [2, 4]


def test_csv_with_semicolons_and_tsv(tmp_path: Path) -> None:
    expected = [{"a": "1,5", "b": "x"}]
    assert values(put(tmp_path, "a.csv", "a;b\n1,5;x\n")) == expected
    assert values(put(tmp_path, "a.tsv", "a\tb\n1,5\tx\n")) == expected


def test_tsv_whose_quotes_are_part_of_the_text(tmp_path: Path) -> None:
    rows = values(
        put(tmp_path, "a.tsv", 'text\tlabel\r\n"Yes, he said.\t0\r\nplain\t1\r\n"No", she said.\t0\r\n')
    )
    assert rows == [
        {"text": '"Yes, he said.', "label": "0"},
        {"text": "plain", "label": "1"},
        {"text": '"No", she said.', "label": "0"},
    ]


def test_tsv_whose_fields_are_quoted(tmp_path: Path) -> None:
    assert values(put(tmp_path, "a.tsv", 'text\tlabel\n"Say ""hi"""\t0\n"one\ntwo"\t1\n')) == [
        {"text": 'Say "hi"', "label": "0"},
        {"text": "one\ntwo", "label": "1"},
    ]
    assert values(put(tmp_path, "b.tsv", 'text\n"one\ntwo"\n')) == [{"text": "one\ntwo"}]


def test_csv_with_too_many_fields_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"line 3: 3 fields under 2 columns \(a, b\)"):
        read_file(put(tmp_path, "a.csv", "a,b\n1,2\n1,2,3\n"))


def test_csv_with_too_few_fields_gives_nulls(tmp_path: Path) -> None:
    assert values(put(tmp_path, "a.csv", "a,b\n1\n")) == [{"a": "1", "b": None}]


def test_csv_with_a_column_twice(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="names a column twice"):
        read_file(put(tmp_path, "a.csv", "a,a\n1,2\n"))


def test_csv_with_a_quote_left_open(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"line 3: not valid CSV"):
        read_file(put(tmp_path, "a.csv", 'a,b\n1,2\n"open,2\n'))


def test_a_long_csv_field(tmp_path: Path) -> None:
    text = "x" * 200_000
    assert values(put(tmp_path, "a.csv", f"text\n{text}\n")) == [{"text": text}]


def test_an_unknown_suffix(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"a file of kind `\.xlsx`"):
        read_file(put(tmp_path, "a.xlsx", b""))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.dictionaries(st.text(min_size=1), st.text() | st.none() | st.integers()), min_size=1))
def test_any_rows_come_back_from_json_lines(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any-rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    assert values(path) == rows
