import pytest

from server.tables import nearest


@pytest.mark.parametrize(("name", "near"), [("prot", "port"), ("HOST", "host"), ("ACMEE", "Acme"), ("acme", "Acme")])
def test_the_nearest_name_is_asked_for_whatever_its_case(name: str, near: str) -> None:
    assert nearest(name, ["host", "port", "Acme"]) == f"did you mean {near!r}?"


def test_where_no_name_is_near_all_are_listed() -> None:
    assert nearest("zzz", ["host", "port"]) == "expected host or port"


def test_of_many_names_only_some_are_listed() -> None:
    names = [f"m{number}" for number in range(500)]
    assert nearest("zzz", names) == f"expected one of 500, such as {' or '.join(names[:12])}"
