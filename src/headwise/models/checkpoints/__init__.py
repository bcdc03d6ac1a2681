"""Models on disk: what a checkpoint holds, read strictly and written whole or not at all."""

from headwise.models.checkpoints.loading import Checkpoint, load
from headwise.models.checkpoints.own import save

__all__ = ["Checkpoint", "load", "save"]
