"""Helpers of the tests of mlflow job that other tests use as well."""

from __future__ import annotations

from serverless_gpu.node.inside.mlflow import job

VARIABLES = (job.URI, job.RUN, job.EXPERIMENT, job.EXPERIMENT_NAME)
