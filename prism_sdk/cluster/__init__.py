"""Describes clusters: topology, measured transfers, and a model for what was not measured. It simulates no job.

profile        Cluster and its parts; load_cluster(): cluster.toml, checked
estimate       estimate(): the time of one operation, with provenance and error
measurements   CSV, JSON and observed traces -> tables
nccltests      logs of nccl-tests -> measured transfers
ncclrecords    records and reports of NCCL's profiler -> measured transfers
writing        format_cluster(): a profile as TOML
"""

from prism_sdk.cluster.estimate import Estimate, estimate
from prism_sdk.cluster.measurements import joined_tables, read_measurements, read_trace, tables_of
from prism_sdk.cluster.ncclrecords import read_nccl
from prism_sdk.cluster.nccltests import read_nccl_tests
from prism_sdk.cluster.profile import Cluster, ClusterError, Shape, Table, builtin_profiles, load_cluster, parse_cluster
from prism_sdk.cluster.writing import format_cluster

__all__ = [
    "Cluster",
    "ClusterError",
    "Estimate",
    "Shape",
    "Table",
    "builtin_profiles",
    "estimate",
    "format_cluster",
    "joined_tables",
    "load_cluster",
    "parse_cluster",
    "read_measurements",
    "read_nccl",
    "read_nccl_tests",
    "read_trace",
    "tables_of",
]
