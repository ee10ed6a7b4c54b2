import pytest

from server.config.tables import as_meant, nearest


@pytest.mark.parametrize(("name", "near"), [("prot", "port"), ("HOST", "host"), ("ACMEE", "Acme"), ("acme", "Acme")])
def test_the_nearest_name_is_asked_for_whatever_its_case(name: str, near: str) -> None:
    assert nearest(name, ["host", "port", "Acme"]) == f"did you mean {near!r}?"


@pytest.mark.parametrize(("name", "near"), [("delay", "batch_delay"), ("DEFAULT", "default_tenant")])
def test_a_word_of_a_name_is_near_it(name: str, near: str) -> None:
    assert nearest(name, ["port", "batch_delay", "default_tenant"]) == f"did you mean {near!r}?"


@pytest.mark.parametrize("name", ["priority", "por_t_ity", ""])
def test_a_name_that_only_shares_letters_is_not_near(name: str) -> None:
    assert nearest(name, ["port", "host"]) == "expected port or host"


def test_where_no_name_is_near_all_are_listed() -> None:
    assert nearest("zzz", ["host", "port"]) == "expected host or port"


def test_of_many_names_only_some_are_listed() -> None:
    names = [f"m{number}" for number in range(500)]
    assert nearest("zzz", names) == f"expected one of 500, such as {' or '.join(names[:12])}"


def test_keys_are_read_as_the_known_ones_they_are_near_to() -> None:
    assert as_meant({"prot": 1, "zzz": 2, "host": 3}, ["port", "host"]) == {"port": 1, "zzz": 2, "host": 3}


def test_a_known_key_is_not_overruled_by_one_that_is_near_to_it() -> None:
    assert as_meant({"prot": 1, "port": 2}, ["port"]) == {"port": 2}
    assert as_meant({"prot": {"a": 1, "b": 1}, "port": {"b": 2}}, ["port"]) == {"port": {"a": 1, "b": 2}}
