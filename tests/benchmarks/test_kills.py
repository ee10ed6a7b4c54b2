"""What a client noticed of a kill: counted, and how long it lasted."""

from benchmarks.kills import Client


def client(answered: list[float], *wrong: tuple[float, str]) -> Client:
    return Client(0, "acme", "kept", answered, list(wrong))


def test_a_client_that_noticed_nothing_has_only_its_pauses() -> None:
    assert client([9.0, 10.2, 10.5, 11.0]).noticed(10.0, 11.1) == ({}, 0.5, 0.0)


def test_wrong_answers_are_counted_until_the_first_right_one_after_the_last() -> None:
    found = client([10.1, 10.3, 11.5, 11.6], (9.9, "503"), (10.2, "503"), (10.4, "503"), (10.5, "lost")).noticed(10.0, 12.0)
    assert found[0] == {"503": 2, "lost": 1}
    assert [round(seconds, 6) for seconds in found[1:]] == [1.2, 1.5]


def test_a_client_that_is_never_served_again_waits_until_the_end() -> None:
    counts, longest, again = client([10.1], (10.2, "refused")).noticed(10.0, 14.1)
    assert (counts, round(longest, 6), round(again, 6)) == ({"refused": 1}, 4.0, 4.1)
