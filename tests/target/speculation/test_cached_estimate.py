from services.target.speculation.estimates.cached_estimate import CachedEstimate


def test_a_value_serves_its_times_under_its_key():
    asked = []

    def work_out() -> int:
        asked.append(len(asked))
        return asked[-1]

    kept = CachedEstimate[int](3)
    assert [kept.get("one", work_out) for _ in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    assert kept.get("other", work_out) == 3
    assert kept.get("one", work_out) == 4  # nothing is remembered of a key that came before
    kept.forget()
    assert [kept.get("one", work_out) for _ in range(4)] == [5, 5, 5, 6]
