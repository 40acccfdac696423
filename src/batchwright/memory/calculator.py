"""The calculator's answer: one model by name, one card, one batch, everything that follows, by formula and at once.

The page of the site runs this very file in the browser, so it imports neither torch nor numpy.

Promises:
- a question is text, as an address carries it (`model=llama-3-8b&card=a100-80gb&batch=64`); what cannot be read, or is
  absurd, is the library's own error;
- nothing is computed here: `bw.plan` and the formulas of `estimate_named` are joined, by the rule of `recommend`: a
  fifth of what CUDA's context leaves stays free;
- numbers travel with the command that gives them again.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

from batchwright.catalogue.cards import Card, all_cards, context_of, find_card
from batchwright.catalogue.models import find_model, load_models
from batchwright.errors import BatchwrightError, InvalidInputError
from batchwright.memory.formula_tensors import OPTIMIZERS, PRECISIONS, TUNINGS, Setup
from batchwright.memory.formulas import checked_length, estimate_named, step_moments
from batchwright.memory.recommend import USED_SHARE
from batchwright.planning.config_check import check_config
from batchwright.planning.dialects import FRAMEWORKS, find_dialect
from batchwright.planning.plan import Plan, plan
from batchwright.planning.search import Curve
from batchwright.units import LARGEST_COUNT, format_bytes, one_of, parse_whole_number, shortened

if TYPE_CHECKING:
    from batchwright.memory.estimate_result import Estimate

SHARDINGS = {
    "none": "each device holds everything",
    "zero-1": "the optimizer's state is shared out",
    "zero-2": "and the gradients",
    "zero-3": "and the weights, as FSDP does",
}
_YES_NO = ("no", "yes")


@dataclass(frozen=True)
class Question:
    """What a person chooses on the page.

    >>> Question.read("model=llama-3-8b&devices=8&sharding=zero-3").devices
    8
    >>> Question.read("modell=gpt2")
    Traceback (most recent call last):
    ...
    batchwright.errors.InvalidInputError: a question has no 'modell'.
      try: model
    """

    model: str = "llama-3-8b"
    card: str = "a100-80gb"
    batch: int = 64
    seq_len: int = 2048
    precision: str = "bf16"
    tuning: str = "lora"
    checkpointing: str = "no"
    optimizer: str = "adamw"
    sharding: str = "none"
    devices: int = 1
    framework: str = "transformers"

    @classmethod
    def read(cls, query: str) -> Question:
        """Read a question as an address carries it; what is not there has its default."""
        names = {field.name: field for field in fields(cls)}
        values: dict[str, Any] = {}
        try:
            pairs = parse_qsl(query.lstrip("?#"), keep_blank_values=True, max_num_fields=100)
        except ValueError as error:
            raise InvalidInputError(f"the question cannot be read: {error}.") from None
        for name, text in pairs:
            if name not in names:
                import difflib

                near = difflib.get_close_matches(name, names, n=1)
                raise InvalidInputError(
                    f"a question has no {shortened(name)}.", remedy=near[0] if near else f"one of {', '.join(names)}"
                )
            if name in values:
                raise InvalidInputError(f"{name} is there twice.", remedy=f"{name} once")
            is_number = isinstance(names[name].default, int)
            values[name] = parse_whole_number(text, name.replace("_", "-")) if is_number else text
        return cls(**values).checked()

    def checked(self) -> Question:
        """Return it with the names as the catalogue writes them, or say which one is not known."""
        shape = find_model(self.model)
        checked_length(shape, self.seq_len)
        setup = self.setup
        sharding = one_of("sharding", self.sharding, SHARDINGS)
        if sharding != "none" and self.devices == 1:
            raise InvalidInputError(f"{sharding} shares out over devices, and there is 1.", remedy="devices=8")
        return replace(
            self,
            model=shape.name,
            card=find_card(self.card).name,
            precision=setup.precision.name,
            tuning=setup.tuning,
            optimizer=setup.optimizer,
            checkpointing=one_of("checkpointing", self.checkpointing, _YES_NO),
            sharding=sharding,
            framework=find_dialect(self.framework).name,
        )

    @property
    def setup(self) -> Setup:
        """How the step is set up, checked."""
        return Setup.of(
            precision=self.precision,
            tuning=self.tuning,
            optimizer=self.optimizer,
            checkpointing=one_of("checkpointing", self.checkpointing, _YES_NO) == "yes",
        )

    @property
    def zero(self) -> int:
        """The stage of ZeRO."""
        return list(SHARDINGS).index(self.sharding)

    @property
    def query(self) -> str:
        """The question as an address carries it."""
        return urlencode(asdict(self))

    def peak(self) -> Callable[[int], int]:
        """Return the peak of a step by its micro-batch, in bytes."""
        shape, setup = find_model(self.model), self.setup

        def peak_at(micro_batch: int) -> int:
            moments = step_moments(
                shape, setup, micro_batch=micro_batch, seq_len=self.seq_len, zero=self.zero, devices=self.devices
            )
            return max(moment.total for moment in moments)

        return peak_at

    def estimate(self, micro_batch: int) -> Estimate:
        """Return the estimate at one micro-batch."""
        return estimate_named(self.model, micro_batch=micro_batch, **self._arguments())

    def _arguments(self) -> dict[str, Any]:
        given: dict[str, Any] = {"seq_len": self.seq_len, "precision": self.precision, "tuning": self.tuning}
        if self.optimizer != "adamw":
            given["optimizer"] = self.optimizer
        if self.checkpointing == "yes":
            given["checkpointing"] = True
        if self.zero:
            given |= {"zero": self.zero, "devices": self.devices}
        return given

    def commands(self, micro_batch: int) -> dict[str, str]:
        """Return what to type: the same answer again, and the exact one for a program of one's own."""
        arguments = ", ".join(f"{name}={value!r}" for name, value in self._arguments().items())
        call = f"bw.estimate_named({self.model!r}, micro_batch={micro_batch}, {arguments})"
        code = f"import batchwright as bw; print({call})"
        devices = ["--devices", str(self.devices)] if self.devices > 1 else []
        own = ["batchwright", "fit", "--on", self.card, *devices]
        return {
            "again": f'python -c "{code}"',
            "exactly": f"{shlex.join(own)} -- python train.py --batch-size {{micro_batch}}",
        }


@dataclass(frozen=True)
class CardAnswer:
    """The largest micro-batch on one card; None where not even one sample fits."""

    card: str
    product: str
    usable_bytes: int
    largest_micro_batch: int | None


@dataclass(frozen=True)
class Change:
    """One change of the question, and what a single sample then needs."""

    name: str
    value: str
    needed_bytes: int
    fits: bool


def answer_query(query: str) -> dict[str, Any]:
    """Answer a question as an address carries it; an error of the library's is an answer too.

    >>> answer = answer_query("model=llama-3-8b&card=a100-80gb&batch=64&tuning=qlora&seq_len=1024")
    >>> answer["fits"], answer["plan"]["micro_batch"], answer["plan"]["accumulation"]
    (True, 6, 10)
    >>> answer_query("model=lama-3-8b")["error"].splitlines()[0]
    "no model is named 'lama-3-8b' in the catalogue."
    """
    try:
        return answer_question(Question.read(query))
    except BatchwrightError as error:
        return {"schema": 1, "error": str(error)}


def answer_question(question: Question) -> dict[str, Any]:
    """Return everything that follows from a question, as plain data."""
    card, peak = find_card(question.card), question.peak()
    curve = Curve(peak, cap=LARGEST_COUNT)  # one for all cards: what one has looked at, the next knows
    rows = [_answer_card(card, curve) for card in all_cards()]
    here = next(row for row in rows if row.card == card.name)
    fits = here.largest_micro_batch is not None
    split = plan(
        question.batch,
        micro_batch=here.largest_micro_batch or 1,
        devices=question.devices,
        estimate=peak,
    )
    estimate = question.estimate(split.micro_batch)
    return {
        "schema": 1,
        "source": "formula",
        "question": asdict(question),
        "query": question.query,
        "fits": fits,
        "summary": _summarize(question, here, split, estimate),
        "card": {**asdict(here), "total_bytes": card.total_bytes, "context_bytes": context_of(card).typical_bytes},
        "used_share": USED_SHARE,
        "estimate": estimate.to_dict(),
        "plan": split.to_dict(),
        "cards": [asdict(row) for row in sorted(rows, key=_by_size)],
        "changes": [asdict(change) for change in _changes(question, here.usable_bytes)],
        "config": split.snippet(question.framework),
        "commands": question.commands(split.micro_batch),
    }


def _usable_bytes(card: Card) -> int:
    return int((card.total_bytes - context_of(card).typical_bytes) * USED_SHARE)


def _answer_card(card: Card, curve: Curve) -> CardAnswer:
    usable = _usable_bytes(card)
    return CardAnswer(card.name, card.product, usable, curve.largest_within(usable) or None)


def _by_size(row: CardAnswer) -> tuple[int, str]:
    return row.usable_bytes, row.card


def _summarize(question: Question, here: CardAnswer, split: Plan, estimate: Estimate) -> str:
    if here.largest_micro_batch is None:
        return (
            f"{question.model} does not fit on {here.card}: one sample of {question.seq_len:,} tokens needs "
            f"{format_bytes(estimate.peak)}, and {format_bytes(here.usable_bytes)} may be used."
        )
    return (
        f"{question.model} fits on {here.card}: micro-batch {split.micro_batch:,} x "
        f"accumulation {split.accumulation:,} x devices {split.devices:,} = {split.effective_batch:,}; "
        f"peak {format_bytes(estimate.peak)} of {format_bytes(here.usable_bytes)} that may be used; "
        f"up to {here.largest_micro_batch:,} samples fit at a time."
    )


def _changes(question: Question, usable: int) -> Iterator[Change]:
    """Name what would need less memory for one sample, by a hundredth at least, one change at a time."""
    now = question.peak()(1)
    offers: list[tuple[str, str]] = [("tuning", tuning) for tuning in TUNINGS if tuning != question.tuning]
    offers += [("checkpointing", "yes")] if question.checkpointing == "no" else []
    if question.devices > 1:
        offers += [("sharding", stage) for stage in SHARDINGS if stage != question.sharding]
    offers += [("seq_len", str(question.seq_len // 2))] if question.seq_len > 1 else []
    for name, value in offers:
        change: dict[str, Any] = {name: int(value) if name == "seq_len" else value}
        changed = replace(question, **change)
        needed = changed.peak()(1)
        if needed < 0.99 * now:
            yield Change(name, value, needed, needed <= usable)


def list_choices() -> dict[str, Any]:
    """Return what the page offers to choose from."""
    return {
        "schema": 1,
        "defaults": asdict(Question()),
        "models": [
            {"name": shape.name, "parameters": shape.parameters, "max_positions": shape.max_positions}
            for shape in load_models().values()
        ],
        "cards": [
            {"name": card.name, "product": card.product, "usable_bytes": _usable_bytes(card)}
            for card in sorted(all_cards(), key=lambda card: (_usable_bytes(card), card.name))
        ],
        "precisions": list(PRECISIONS),
        "tunings": list(TUNINGS),
        "optimizers": list(OPTIMIZERS),
        "shardings": list(SHARDINGS),
        "frameworks": list(FRAMEWORKS),
    }


def check_text(text: str, suffix: str, devices: str) -> dict[str, Any]:
    """Check the text of a config file, as `bw.check_config` checks the file."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"config{suffix}")
        file.write_text(text, encoding="utf-8")
        try:
            check = check_config(file, devices=parse_whole_number(devices, "devices"))
        except BatchwrightError as error:
            return {"schema": 1, "error": str(error).replace(f"{folder}/", "")}
        return replace(check, path=file.name).to_dict()
