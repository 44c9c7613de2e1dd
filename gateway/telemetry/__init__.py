"""Prometheus metrics, OpenTelemetry spans and the request log."""
