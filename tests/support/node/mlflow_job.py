"""Helpers of the tests of mlflow job that other tests use as well."""

from __future__ import annotations

from serverless_gpu.node.inside import mlflow_job

VARIABLES = (mlflow_job.URI, mlflow_job.RUN, mlflow_job.EXPERIMENT, mlflow_job.EXPERIMENT_NAME)
