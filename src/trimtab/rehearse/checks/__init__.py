"""Checks for faults that raise nothing, and for the causes of those that do. Each file is one family."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.rehearse.checks.base import BaseCheck
    from trimtab.rehearse.process import Process


def all_checks(process: Process) -> list[BaseCheck]:
    """All checks, in the order in which they are put in."""
    from trimtab.rehearse.checks.angles import Angles
    from trimtab.rehearse.checks.apart import Apart
    from trimtab.rehearse.checks.averages import Averages
    from trimtab.rehearse.checks.checkpoints import Checkpoints
    from trimtab.rehearse.checks.clearing import Clearing
    from trimtab.rehearse.checks.consumed import Consumed
    from trimtab.rehearse.checks.data_order import DataOrder
    from trimtab.rehearse.checks.ddp import Ddp
    from trimtab.rehearse.checks.gathered import Gathered
    from trimtab.rehearse.checks.gradients import Gradients
    from trimtab.rehearse.checks.graph_kept import GraphKept
    from trimtab.rehearse.checks.in_place import InPlace
    from trimtab.rehearse.checks.launcher import StaleLauncher
    from trimtab.rehearse.checks.left_out import LeftOut
    from trimtab.rehearse.checks.losses import Losses
    from trimtab.rehearse.checks.lost_terms import LostTerms
    from trimtab.rehearse.checks.made_anew import MadeAnew
    from trimtab.rehearse.checks.modes import Modes
    from trimtab.rehearse.checks.no_effect import NoEffect
    from trimtab.rehearse.checks.nothing_loaded import NothingLoaded
    from trimtab.rehearse.checks.one_sided import OneSided
    from trimtab.rehearse.checks.reduced import Reduced
    from trimtab.rehearse.checks.replicas import Replicas
    from trimtab.rehearse.checks.roles import Roles
    from trimtab.rehearse.checks.rounded import Rounded
    from trimtab.rehearse.checks.rows import Rows
    from trimtab.rehearse.checks.scaler import Scaler
    from trimtab.rehearse.checks.sharded import Sharded
    from trimtab.rehearse.checks.squares import Squares
    from trimtab.rehearse.checks.stale_optimizer import StaleOptimizer
    from trimtab.rehearse.checks.states import States
    from trimtab.rehearse.checks.steps import Steps
    from trimtab.rehearse.checks.underflow import Underflow
    from trimtab.rehearse.checks.untrained import Untrained
    from trimtab.rehearse.checks.unwritten import Unwritten
    from trimtab.rehearse.checks.values import Values

    first = (Checkpoints, Gradients, Untrained, StaleOptimizer, LeftOut, Clearing, Modes, Consumed, GraphKept)
    second = (InPlace, LostTerms, Ddp, DataOrder, Apart, Rows, Replicas, Reduced, Gathered)
    third = (OneSided, Sharded, StaleLauncher, Scaler, Underflow, Rounded, Averages, Angles, Losses)
    last = (Squares, States, Roles, NoEffect, NothingLoaded, MadeAnew, Unwritten, Values, Steps)
    return [check(process) for check in (*first, *second, *third, *last)]
