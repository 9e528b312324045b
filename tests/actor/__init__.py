import pytest

pytest.register_assert_rewrite("tests.actor.contract")  # its asserts explain themselves too
