"""Predicts a job from its execution graph alone: no program, no torch. It records nothing and talks to no device.

A map for newcomers, in the order of dependence::

    compiling, kernel    the inner loops, compiled by numba where it is installed
    job                  SimJob: programs of roles, lanes, weights (the model is written there)
    lanes, weights       how operations of ranks meet; weights from calibrated columns or from observed times
    loading              load(): a trace file -> SimJob
    simulation           simulate(): SimJob -> Timeline, an exact longest path
    critical, report     the longest path back; summarise(): a Report
    output               write_timeline(): a Timeline -> a trace file
    links, flows         shared_links(): which links transfers share; the loop in order of time that shares them
    transfers            with_cluster(): transfers of a cluster profile
    selection, changes   which units; slow, scaled, equal, random weights (variants shares what stays)
    restructure, replicas   units removed, microbatches, schedules; data-parallel size
    scenario             Scenario: all changes, as the command line takes them
"""

from prism_sdk.simulate.critical import PathPart, critical_path
from prism_sdk.simulate.job import SimJob
from prism_sdk.simulate.loading import load
from prism_sdk.simulate.output import write_timeline
from prism_sdk.simulate.report import Report, summarise
from prism_sdk.simulate.scenario import Scenario
from prism_sdk.simulate.simulation import RankTimes, Timeline, simulate

__all__ = [
    "PathPart",
    "RankTimes",
    "Report",
    "Scenario",
    "SimJob",
    "Timeline",
    "critical_path",
    "load",
    "simulate",
    "summarise",
    "write_timeline",
]
