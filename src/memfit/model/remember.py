"""Remembers what was found out about a model for as long as the model lives, and no longer: with the model it goes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from memfit.model.description import Model

_Function = TypeVar("_Function", bound=Callable[..., Any])


def of_model(at_most: int) -> Callable[[_Function], _Function]:
    """For a pure function of a model and other arguments, by position, that can be keys: what it returns is kept on the model.

    `functools.lru_cache` would keep the model alive instead. Of more than `at_most` results the oldest is forgotten.
    """

    def decorate(function: _Function) -> _Function:
        name = f"{function.__module__}.{function.__qualname__}"

        @wraps(function)
        def remembering(model: Model, *arguments: Any) -> Any:
            known = model.memory.get(name)
            if known is None:
                known = model.memory[name] = {}
            found = known.get(arguments)
            if found is None:
                found = function(model, *arguments)
                if len(known) >= at_most:
                    del known[next(iter(known))]
                known[arguments] = found
            return found

        return cast(_Function, remembering)

    return decorate
