"""Pages of benchmarks, as they are written."""

import pytest
from matplotlib.figure import Figure

from bench.harness import report


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_chosen", tmp_path)
    return tmp_path


def test_a_table_has_its_columns_whatever_is_in_them(folder):
    made = report.Report("x", "A title")
    made.add(**{"a|b": "one|two", "c": "three\nfour"})
    made.write()
    table = (folder / "x.md").read_text().splitlines()[4:7]
    assert table == [r"| a\|b | c |", "| --- | --- |", r"| one\|two | three four |"]


def test_a_page_shows_its_own_picture_and_no_earlier_one(folder):
    for drawn in (True, False):
        made = report.Report("x", "A title")
        made.add(a=1)
        if drawn:
            made.save(Figure())
        made.write()
        assert ("![A title](x.png)" in (folder / "x.md").read_text()) == drawn
    assert (folder / "x.png").exists()
