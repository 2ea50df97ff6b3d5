"""10,000 mutated streams of the agents: no exception, no frozen turn, nothing blank or unseen."""

from browser import Page
from service import Service
from test_browser import fuzz, page, pytestmark

__all__ = ["page", "pytestmark"]


def test_ten_thousand_mutated_streams(page: Page, service: Service) -> None:  # noqa: F811
    assert fuzz(page, service, 10_000, seed=11) == []
