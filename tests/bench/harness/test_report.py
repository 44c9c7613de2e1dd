"""The Markdown pages of reports."""

from matplotlib.figure import Figure

from bench.harness import report


def test_table_cells_are_escaped(report_folder):
    made = report.Report("x", "A title")
    made.add(**{"a|b": "one|two", "c": "three\nfour"})
    made.write()
    table = (report_folder / "x.md").read_text().splitlines()[4:7]
    assert table == [r"| a\|b | c |", "| --- | --- |", r"| one\|two | three four |"]


def test_page_shows_a_plot_only_of_its_own_run(report_folder):
    for drawn in (True, False):
        made = report.Report("x", "A title")
        made.add(a=1)
        if drawn:
            made.save(Figure())
        made.write()
        assert ("![A title](x.png)" in (report_folder / "x.md").read_text()) == drawn
    assert (report_folder / "x.png").exists()
