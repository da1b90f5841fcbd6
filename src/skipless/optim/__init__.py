"""Optimisers: KL-Shampoo, KL-SOAP, SOAP, Shampoo, Muon and AdamW, routed by parameter role.

Start with build.py (settings to optimiser), then whitening.py (the header essay).
"""

from skipless.config import OptimizerRecipe
from skipless.optim.build import AdamW, build_optimizer
from skipless.optim.muon import Muon, orthogonalize
from skipless.optim.roles import parameter_roles
from skipless.optim.schedules import schedule
from skipless.optim.whitening import KLSOAP, SOAP, KLShampoo, Shampoo

__all__ = [
    "KLSOAP",
    "SOAP",
    "AdamW",
    "KLShampoo",
    "Muon",
    "OptimizerRecipe",
    "Shampoo",
    "build_optimizer",
    "orthogonalize",
    "parameter_roles",
    "schedule",
]
