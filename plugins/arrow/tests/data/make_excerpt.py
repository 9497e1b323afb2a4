"""Cuts the test excerpt out of a published table: two steps of job ST. Not run by the tests.

python make_excerpt.py trace-ST.parquet
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

if __name__ == "__main__":
    table = pq.read_table(sys.argv[1], filters=pc.field("step").isin([23, 263]))
    pq.write_table(table.replace_schema_metadata(None), Path(__file__).parent / "trace-ST-2steps.parquet")
