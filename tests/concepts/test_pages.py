"""The concept pages: their form, their arithmetic, and the loop they print."""

from __future__ import annotations

import re
import unicodedata

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from batchwright.concepts import LANGUAGES, TOPICS, read_page


def columns(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


def split_fences(text: str) -> tuple[list[str], list[str]]:
    pieces = text.split("```")
    assert len(pieces) % 2 == 1, "a fence is left open"
    return [line for piece in pieces[::2] for line in piece.splitlines()], [
        line for piece in pieces[1::2] for line in piece.splitlines()
    ]


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("topic", TOPICS)
def test_a_page_has_its_form(topic: str, lang: str) -> None:
    page = read_page(topic, lang)
    assert page.title
    assert columns(page.summary) <= 90
    prose, pictures = split_fences(page.text)
    # A drawn code block loses two columns of an 80-column terminal. Chinese is not folded by hand: a renderer puts
    # a space where the line breaks.
    assert max(map(columns, pictures)) <= 78
    assert lang == "zh" or max(map(columns, prose)) <= 88


@pytest.mark.parametrize("topic", TOPICS)
def test_both_languages_have_the_same_sections_and_references(topic: str) -> None:
    pages = [read_page(topic, lang).text for lang in LANGUAGES]
    assert len({len(re.findall(r"^## ", text, re.M)) for text in pages}) == 1
    references = [sorted(re.findall(r"arXiv\s+(\d{4}\.\d{5})", text)) for text in pages]
    assert references[0] == references[1]


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_printed_loop_equals_big_batches(lang: str) -> None:
    code = re.findall(r"```python\n(.*?)```", read_page("accumulation", lang).text, re.S)[0]
    torch.manual_seed(0)
    inputs, targets = torch.randn(45, 6, dtype=torch.float64), torch.randint(0, 3, (45,))
    accumulated, at_once = (torch.nn.Linear(6, 3, dtype=torch.float64) for _ in range(2))
    at_once.load_state_dict(accumulated.state_dict())
    exec(
        code,
        {
            "model": accumulated,
            "optimizer": torch.optim.SGD(accumulated.parameters(), lr=0.5),
            "loader": DataLoader(TensorDataset(inputs, targets), batch_size=8),
        },
    )
    optimizer = torch.optim.SGD(at_once.parameters(), lr=0.5)
    for window in (slice(0, 32), slice(32, 45)):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(at_once(inputs[window]), targets[window]).backward()
        optimizer.step()
    for a, b in zip(accumulated.parameters(), at_once.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)
