"""How long two engines' answers agree."""



from benchmarks.accuracy import Agreement


def test_answers_agree_until_their_first_difference() -> None:
    found = Agreement.of([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]])
    assert found == Agreement(equal_share=7 / 8, first_differences=(2, 4))


