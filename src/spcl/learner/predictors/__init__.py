"""What predicts classes: the trained heads, or heads made from the samples in memory without their recency bias."""

from spcl.learner.predictors.adjusted import AdjustedLogits
from spcl.learner.predictors.balanced_heads import BalancedHeads
from spcl.learner.predictors.base import PREDICTORS, ClassPredictor, StepSamples, StoredFeatures, TrainedHeads
from spcl.learner.predictors.class_means import ClassMeans
from spcl.learner.predictors.prediction_heads import PredictionHeads

__all__ = [
    "PREDICTORS",
    "AdjustedLogits",
    "BalancedHeads",
    "ClassMeans",
    "ClassPredictor",
    "PredictionHeads",
    "StepSamples",
    "StoredFeatures",
    "TrainedHeads",
]
