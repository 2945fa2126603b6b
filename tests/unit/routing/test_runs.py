"""The order in which a replica's expected pages are used, and that neither it nor its lists grow without bound."""

from routing.index import PrefixIndex
from routing.page_owners import SLACK, Expected, Run

A = 0


def index(*, capacity: int = 10_000) -> tuple[PrefixIndex, Expected]:
    made = PrefixIndex()
    made.join(A, capacity=capacity)
    return made, made._replicas[A].expected


def runs(expected: Expected) -> list[list[int]]:
    """Live pages of each run, oldest run first."""
    return [expected.live(run) for run in expected.runs()]


def num_listed(expected: Expected) -> int:
    return sum(len(run.pages) for run in expected.runs())


def test_a_prefix_used_over_and_over_does_not_grow_the_order_of_use() -> None:
    made, expected = index()
    for number in range(10_000):
        made.expect(A, list(range(1, 51)), number=number)
        assert len(expected._order) <= 2 + SLACK
    assert runs(expected) == [list(range(1, 51))]
    made.check()


def test_runs_that_events_confirmed_do_not_grow_the_order_of_use() -> None:
    made, expected = index(capacity=100)
    for number in range(1_000):
        pages = [2 * number, 2 * number + 1]
        made.expect(A, pages, number=number)
        made.stored(A, pages)
        made.removed(A, pages)
        assert len(expected._order) <= 2 + SLACK
    assert (runs(expected), made.num_pages(A)) == ([], (0, 0))


def test_pages_that_left_runs_which_live_on_do_not_stay_listed() -> None:
    """Of each run of ten, nine are confirmed and removed: 400 live pages, 4,000 listed without a collection."""
    made, expected = index()
    for number in range(400):
        pages = list(range(10 * number, 10 * number + 10))
        made.expect(A, pages, number=number)
        made.removed(A, pages[:3] + pages[4:])
        assert num_listed(expected) <= 2 * (expected.num_pages + 9) + SLACK  # nine were live when it was used
    assert runs(expected) == [[10 * number + 3] for number in range(400)]
    made.check()


def test_a_collection_forgets_no_live_page_and_keeps_the_order() -> None:
    made, expected = index()
    for number in range(3):
        made.expect(A, [10 * number, 10 * number + 1], number=number)
    made.removed(A, [0])
    for number in range(3, 2 * SLACK):  # the middle one is used again and again
        made.expect(A, [10, 11], number=number)
    assert runs(expected) == [[1], [20, 21], [10, 11]]
    assert made.pages(A) == {1, 10, 11, 20, 21}
    made.check()


def test_what_is_used_of_a_run_s_beginning_is_cut_off_and_the_rest_stays_whole() -> None:
    made, expected = index()
    made.expect(A, [1, 2, 3, 4], number=0)
    made.expect(A, [1, 2, 5], number=1)
    assert [run.pages for run in expected.runs()] == [[3, 4], [5], [1, 2]]
    assert all(run.whole for run in expected.runs())


def test_parts_of_one_run_that_others_share_differently_become_one_run_again() -> None:
    """B holds 1, C holds 1 and 2: three entries, yet one run of A before and after."""
    made, expected = index()
    for replica, pages in ((1, [1]), (2, [1, 2])):
        made.join(replica, capacity=10)
        made.stored(replica, pages)
    for number in range(3):
        made.expect(A, [1, 2, 3], number=number)
        assert [run.pages for run in expected.runs()] == [[1, 2, 3]]
    made.check()


def test_the_oldest_run_comes_first_and_may_be_put_back() -> None:
    expected = Expected(1, {})
    first, second = Run(owner=expected, number=0), Run(owner=expected, number=1)
    for run, page in ((first, 1), (second, 2)):
        expected.add(run, [page])
        expected.use([run])
    expected.use([first])
    assert expected.pop_oldest() is second
    expected.put_back(second, [2])
    assert expected.runs() == [second, first]
    assert (expected.pop_oldest(), expected.pop_oldest()) == (second, first)


def test_a_run_that_loses_its_last_page_is_passed_over() -> None:
    expected = Expected(1, {})
    dead, live = Run(owner=expected, number=0), Run(owner=expected, number=1)
    for run, pages in ((dead, [1, 2]), (live, [3])):
        expected.add(run, pages)
        expected.use([run])
    expected.lose(dead, 2)
    assert (dead.pages, expected.num_pages) == ([], 1)
    assert expected.pop_oldest() is live
