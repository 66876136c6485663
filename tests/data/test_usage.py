from kedge.data import DataUsage, Preview


def test_the_line_says_what_is_used_held_out_and_dropped():
    dropped = {"longer than data.max_prompt_tokens=512": 1180, "field 'prompt' is empty": 8}
    usage = DataUsage(("a.jsonl", "b.jsonl"), 2400, 1212, held_out=60, cut=3, dropped=dropped, notes=["by row"])
    assert usage.line == (
        "1,212 of 2,400 rows of a.jsonl, b.jsonl used, 60 of them held out; 1,188 dropped: "
        "1,180 longer than data.max_prompt_tokens=512, 8 field 'prompt' is empty; 3 rows cut to fit; by row"
    )
    assert usage.as_json()["line"] == usage.line
    assert DataUsage((), 3, 3).line == "all 3 rows used"
    assert DataUsage(tuple("abcde"), 3, 3).line == "all 3 rows of a, b, c and 2 more used"


def test_a_model_card_names_no_folder_of_the_machine():
    assert (
        DataUsage(("./secret/place/rows.jsonl", "org/name"), 3, 3).public_line
        == "all 3 rows of rows.jsonl, org/name used"
    )
    mixed = DataUsage(("/secret/a.jsonl", "/secret/b.jsonl"), 3, 3, shares=(0.7, 0.3))
    assert mixed.public_line == "all 3 rows of a.jsonl, b.jsonl used; drawn as 70% a.jsonl, 30% b.jsonl"


def test_a_preview_without_usable_rows_says_what_may_help() -> None:
    usage = DataUsage(rows=1, dropped={"prompt longer than data.max_prompt_tokens=3": 1})
    lines = Preview("sft", usage, {}, {}, (), "tokens").lines(80)
    assert lines[2].startswith("no usable row; the limit is data.max_prompt_tokens, or the model's context; data.trunc")


def test_a_preview_of_thousands_of_columns_has_a_short_line() -> None:
    columns = {f"id{number}": "{'speech': 'The tide went out.'}" for number in range(5000)}
    line = Preview("sft", DataUsage(rows=1), columns, {}, (), "tokens").lines(80)[1]
    assert line.startswith("columns: id0 ({'speech': ")
    assert len(line) < 2020
