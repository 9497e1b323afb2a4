from prism_sdk.abc import TraceImporter
