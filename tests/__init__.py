"""Tests of serverless-gpu."""
