"""The networks by `ShapeConfig.kind`; trained, each is drafted with by a `shape.drafters.TrainedDrafter`."""

from shape.networks.base import Predictor
from shape.networks.block import BlockPredictor
from shape.networks.eagle import EaglePredictor, ParallelEaglePredictor
from shape.networks.medusa import MedusaPredictor
from shape.networks.mtp import MtpPredictor
from shape.networks.shape import ShapePredictor

_NETWORKS = ShapePredictor, MedusaPredictor, EaglePredictor, ParallelEaglePredictor, MtpPredictor, BlockPredictor
PREDICTORS: dict[str, type[Predictor]] = {network.kind: network for network in _NETWORKS}
