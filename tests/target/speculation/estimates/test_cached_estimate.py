"""CachedEstimate: how long a computed value serves."""

from services.target.speculation.estimates.cached_estimate import CachedEstimate


def test_a_value_is_computed_once_for_a_number_of_uses():
    computed = []

    def compute() -> int:
        computed.append(len(computed))
        return computed[-1]

    estimate = CachedEstimate[int](3)
    assert [estimate.get("one", compute) for _ in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    assert estimate.get("other", compute) == 3
    assert estimate.get("one", compute) == 4  # only the value of the last key is cached
    estimate.forget()
    assert [estimate.get("one", compute) for _ in range(4)] == [5, 5, 5, 6]
