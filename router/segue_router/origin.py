"""What an answer began with: its model, its context length and its defaults, as the first engine had them.

Owns what an engine must have to go on with the answer, and what it can do for it. No I/O. Invariant: it is
what it was then, whatever becomes of that engine, until the answer starts again.
"""

from __future__ import annotations

from dataclasses import dataclass

from segue_router.engine import Engine, Served
from segue_router.resume import Target


@dataclass(frozen=True, slots=True)
class Beginning:
    """The engine on which the answer began, as it was then."""

    served: Served | None
    max_model_len: int | None
    defaults: dict[str, float]


class Origin:
    """Of the answer to one request for `model`."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._beginning: Beginning | None = None

    def began_on(self, engine: Engine) -> None:
        """Part of the answer is there. If it is the first part, `engine` said it."""
        if self._beginning is None:
            self._beginning = Beginning(
                engine.served(self._model), engine.max_model_len(self._model), engine.generation_defaults
            )

    def starts_again(self) -> None:
        """Nothing of the answer counts any more."""
        self._beginning = None

    @property
    def model(self) -> str:
        """The model that it began with, or is asked of."""
        began = self._beginning
        return began.served.model if began and began.served else self._model

    def target(self, engine: Engine, *, give_back: int | None = 0) -> Target:
        """What `engine` can do for the answer."""
        began = self._beginning
        if began is None:
            length = engine.max_model_len(self._model)
            return Target(
                length, defaults=engine.generation_defaults, exact=engine.exact, give_back=give_back
            )
        set_there = {name: value for name, value in began.defaults.items() if value}
        return Target(
            began.max_model_len or engine.max_model_len(self.model),
            model=self.model,
            defaults={**engine.generation_defaults, **set_there},
            exact=engine.exact,
            give_back=give_back,
        )

    def fits(self, engine: Engine) -> bool:
        """Whether it has the model that the answer began with, and room for as long an answer."""
        began = self._beginning
        if began is None or began.served is None:
            return True
        model = began.served.model
        served, length = engine.served(model), engine.max_model_len(model)
        if served is None:  # not reached yet: its configuration must name the model
            return engine.settings.model == model
        if not served.same_as(began.served):
            return False
        return began.max_model_len is None or length is None or length >= began.max_model_len
