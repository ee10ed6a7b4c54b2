import pytest

from server.config.tables import nearest


@pytest.mark.parametrize(("name", "near"), [("prot", "port"), ("HOST", "host"), ("ACMEE", "Acme"), ("acme", "Acme")])
def test_the_nearest_name_is_suggested_in_any_case(name: str, near: str) -> None:
    assert nearest(name, ["host", "port", "Acme"]) == f"did you mean {near!r}?"


@pytest.mark.parametrize("name", ["priority", "por_t_ity", ""])
def test_a_name_that_only_shares_letters_is_not_suggested(name: str) -> None:
    assert nearest(name, ["port", "host"]) == "expected port or host"


def test_only_some_of_many_known_names_are_listed() -> None:
    names = [f"m{number}" for number in range(500)]
    assert nearest("zzz", names) == f"expected one of 500, such as {' or '.join(names[:12])}"
