"""`art.model` under hone's name: Model, and TrainableModel with ART's default learning rate.

In:   the fields of a model
Out:  a registration; jobs that set no learning rate are trained with ART's
"""

from typing import Any, Generic

from hone import model
from hone.model import ConfigT, Model
from hone.train_config import ART_LEARNING_RATE
from hone.types import ModelSpec

__all__ = ["Model", "TrainableModel"]

_RATES = ("learning_rate", "learning_rates")


class TrainableModel(model.TrainableModel[ConfigT], Generic[ConfigT]):
    """A trained model whose jobs use ART's learning rate if neither job nor model sets one."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)  # written out for type checkers: `_internal_config` is no field

    def spec(self) -> ModelSpec:
        """The registration, with ART's learning rate as a default if the model has none."""
        spec = super().spec()
        own = (spec.defaults, spec.trainer_args)
        if any(keys.get(rate) is not None for keys in own for rate in _RATES):
            return spec
        return spec.model_copy(
            update={"defaults": {**spec.defaults, "learning_rate": ART_LEARNING_RATE}}
        )
