"""What happens inside a model: moments, geometry of joins, attention, spectra, gradients.

`Probe` measures a running model; the functions measure single tensors. Works on any nn.Module.
"""

from skipless.probes.attention import AttentionStatistics, attention_statistics, eager_attention
from skipless.probes.geometry import JoinGeometry, join_geometry, token_similarity
from skipless.probes.gradients import gradient_norms
from skipless.probes.isometry import (
    isometry_drift,
    isometry_error,
    polar_step_bound,
    sign_step_estimate,
)
from skipless.probes.moments import Moments, batch_moments
from skipless.probes.probe import Probe
from skipless.probes.spectrum import Sketch, effective_rank, principal_angle, spectrum_share
from skipless.probes.statistics import (
    activation_moments,
    cross_cumulant_share,
    excess_kurtosis,
    haar_mixing_factor,
    independent_sum_excess,
    max_excess_kurtosis,
    mixing_factor,
    one_hot_excess,
    sqnr,
)

__all__ = [
    "AttentionStatistics",
    "JoinGeometry",
    "Moments",
    "Probe",
    "Sketch",
    "activation_moments",
    "attention_statistics",
    "batch_moments",
    "cross_cumulant_share",
    "eager_attention",
    "effective_rank",
    "excess_kurtosis",
    "gradient_norms",
    "haar_mixing_factor",
    "independent_sum_excess",
    "isometry_drift",
    "isometry_error",
    "join_geometry",
    "max_excess_kurtosis",
    "mixing_factor",
    "one_hot_excess",
    "polar_step_bound",
    "principal_angle",
    "sign_step_estimate",
    "spectrum_share",
    "sqnr",
    "token_similarity",
]
