from engines.memo import Memo


def test_the_oldest_entry_makes_room_for_a_new_one() -> None:
    memo = Memo[str, int](2)
    for number, key in enumerate("abc"):
        memo.remember(key, number)
    assert memo == {"b": 1, "c": 2}


def test_looking_up_does_not_keep_an_entry() -> None:
    memo = Memo[str, int](2)
    memo.remember("a", 0)
    memo.remember("b", 1)
    assert memo.get("a") == 0
    memo.remember("c", 2)
    assert "a" not in memo


def test_replacing_an_entry_drops_no_other() -> None:
    memo = Memo[str, int](2)
    memo.remember("a", 0)
    memo.remember("b", 1)
    memo.remember("b", 2)
    assert memo == {"a": 0, "b": 2}
